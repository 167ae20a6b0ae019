"""What later steps need is made beside the steps that run: on a thread of its own, in order."""

import logging
import threading
from collections.abc import Callable

from indexer_service.executor import DeviceLost, StepCancelled

logger = logging.getLogger(__name__)

Make = Callable[[int, Callable[[], bool]], None]
"""Given rows of a decode request, and whether to stop; makes what such steps need."""


class Preparation:
    """One thread at a time, and only while something is wanted.

    What could not be made is not tried again before `stop`: it would fail at every step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._failed: dict[int, str] = {}
        self._lost: str | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def want(self, rows_per_decode: int, make: Make) -> str | None:
        """Have it made, once; returns at once: why it could not be made, if it failed.

        Raises:
            DeviceLost: the GPU was lost while something was made.
        """
        self.raise_if_lost()
        with self._lock:
            if rows_per_decode in self._failed:
                return self._failed[rows_per_decode]
            if rows_per_decode in self._wanted or self._stopping.is_set():
                return None
            self._wanted.append(rows_per_decode)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(make,), name="preparation", daemon=True
                )
                self._thread.start()
            return None

    def raise_if_lost(self) -> None:
        """
        Raises:
            DeviceLost: as for `want`.
        """
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def stop(self) -> None:
        """Break off, and return when nothing is made any more. What is wanted later is made."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            self._wanted.clear()
            self._failed.clear()
            self._stopping.clear()

    def _run(self, make: Make) -> None:
        while True:
            with self._lock:
                if not self._wanted or self._stopping.is_set():
                    self._thread = None
                    return
                rows = self._wanted[0]
            failed, lost = None, None
            try:
                make(rows, self._stopping.is_set)
            except StepCancelled:
                pass
            except DeviceLost as error:
                lost = str(error)
            except Exception as error:
                # Such steps are given up, or answered without graphs.
                logger.exception("preparing %d rows a decode request", rows)
                # Not the error: it leads to what was being made, and so to the session's memory.
                failed = str(error) or type(error).__name__
            with self._lock:
                self._wanted.remove(rows)
                if lost is not None:
                    self._lost = lost
                if failed is not None:
                    self._failed[rows] = failed
