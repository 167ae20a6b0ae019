"""Keeps a stream's queue of launches from filling.

A launch into a full queue waits for the device inside of CUDA. Triton launches with Python's lock
held: behind a gate that waits, the whole process would stand still, also who wants to end it.
"""

import time
from collections import deque
from collections.abc import Callable

from indexer_service.device_stream import Mark

_MOST = 512
"""Launches that may be waiting; CUDA queues about twice as many."""
_BETWEEN_MARKS = 64
_LOOK_SECONDS = 0.0002


class LaunchBudget:
    """Of one stream, for the thread that launches there.

    Args:
        mark: marks the end of what was launched so far.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._marks: deque[tuple[Mark, int]] = deque()
        self._waiting = 0
        self._unmarked = 0

    def spend(self, launches: int) -> None:
        """So many were launched; waits, without Python's lock, while too many are not done."""
        self._unmarked += launches
        if self._unmarked < _BETWEEN_MARKS:
            return
        self._marks.append((self._mark(), self._unmarked))
        self._waiting += self._unmarked
        self._unmarked = 0
        while self._waiting > _MOST:
            if self._marks[0][0].query():
                self._waiting -= self._marks.popleft()[1]
            else:
                time.sleep(_LOOK_SECONDS)
