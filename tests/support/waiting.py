"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
