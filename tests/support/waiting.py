"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

# Longest wait for what should take milliseconds: any thread of a busy machine may stand still
# for seconds, and that is no fault of what is tested.
SOON = 30.0


def eventually(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    """Whether `condition` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
