"""Settings of the property tests (apart from `support`, which peers import at every start)."""

from hypothesis import settings

# How long an example takes says more about the machine than about the code.
unhurried = settings(deadline=None)
