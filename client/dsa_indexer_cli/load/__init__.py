"""Load tests of a service: workloads, sessions that run them, and what they found."""
