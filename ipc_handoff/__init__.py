"""The data contract between worker and service: shared memory, banks, doorbells, ring, stamps.

Both sides use this package, and it knows neither of them.
"""
