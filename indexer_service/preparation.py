"""What later steps need is made beside the steps that run: on a thread of its own, in order."""

import logging
import threading
from collections.abc import Callable

from indexer_service.executor import StepCancelled

logger = logging.getLogger(__name__)

Make = Callable[[int, Callable[[], bool]], None]
"""Given rows of a decode request, and whether to stop; makes what such steps need."""


class Preparation:
    """One thread at a time, and only while something is wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def want(self, rows_per_decode: int, make: Make) -> None:
        """Have it made, once; returns at once."""
        with self._lock:
            if rows_per_decode in self._wanted or self._stopping.is_set():
                return
            self._wanted.append(rows_per_decode)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(make,), name="preparation", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Break off, and return when nothing is made any more. What is wanted later is made."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            self._wanted.clear()
            self._stopping.clear()

    def _run(self, make: Make) -> None:
        while True:
            with self._lock:
                if not self._wanted or self._stopping.is_set():
                    self._thread = None
                    return
                rows = self._wanted[0]
            try:
                make(rows, self._stopping.is_set)
            except StepCancelled:
                pass
            except Exception:
                # Such steps are given up, or answered without graphs.
                logger.exception("preparing %d rows a decode request", rows)
            with self._lock:
                self._wanted.remove(rows)
