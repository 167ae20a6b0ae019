"""A thread that sees the service die, and tells the worker's kernels at once."""

import os
import threading

import numpy as np
import numpy.typing as npt
import torch

from ipc_handoff.processes import ProcessWatch
from ipc_handoff.wakeups import Wakeup, sleep_until_any

_FOREVER = 3600.0


class Watchdog:
    """While a kernel waits, the host's threads may sleep in CUDA: this one writes memory only.

    The bound of a wait is the device's own and needs nobody; this shortens it.

    Args:
        order: int64 [1] in memory that kernels read: the attachment that is to end.
    """

    def __init__(self, order: torch.Tensor) -> None:
        self._order: npt.NDArray[np.int64] = order.numpy()
        self._wake = Wakeup()
        self._lock = threading.Lock()
        self._number = 0
        self._process: int | None = None
        self._dead = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dsa-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, number: int, watch: ProcessWatch) -> None:
        """From now on the service of attachment `number` is watched, and no other."""
        process = watch.fileno()
        with self._lock:
            self._number = number
            self._replace(None if process is None else os.dup(process))
        self._wake.ring()

    def end(self, number: int) -> None:
        """The attachment is over: no wait for it goes on."""
        with self._lock:
            self._order[0] = number
            if self._number == number:
                self._replace(None)
        if not self._closing:
            self._wake.ring()

    def is_dead(self, number: int) -> bool:
        """Whether the service of that attachment was seen to die."""
        return self._dead == number

    def close(self) -> None:
        """A second time does nothing."""
        if self._closing:
            return
        self._closing = True
        self._wake.ring()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self._replace(None)
        self._wake.close()

    def _replace(self, process: int | None) -> None:
        if self._process is not None:
            os.close(self._process)
        self._process = process

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                # A duplicate of its own: the number must not be another's while it is waited for.
                number = self._number
                process = None if self._process is None else os.dup(self._process)
            try:
                watched = [self._wake.fileno()] + ([] if process is None else [process])
                awake = sleep_until_any(watched, _FOREVER)
            finally:
                if process is not None:
                    os.close(process)
            self._wake.clear()
            if process in awake:
                with self._lock:
                    if self._number == number:
                        self._order[0] = number
                        self._dead = number
                        self._replace(None)
