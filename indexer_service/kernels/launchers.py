"""Triton's launchers, made by one thread at a time.

A launcher is an extension module; all have one name. One that was loaded before, CPython gives out
again as the module of that name, filled anew: of two threads that make launchers at once, one can
get the other's function. It then launches its kernel with arguments of another one's types, for
good: an illegal access, or a TypeError where their number differs.
"""

import threading
from functools import wraps
from typing import Any

_lock = threading.Lock()
_made_safe: set[type] = set()


def make_one_at_a_time() -> None:
    """In this process, from now on; a second time does nothing. Without a GPU's Triton neither.

    Before threads make kernels: those of a warm-up, and those of sessions beside each other.
    """
    try:
        from triton.backends.nvidia.driver import CudaLauncher
    except ImportError:
        return
    with _lock:
        if CudaLauncher in _made_safe:
            return
        _made_safe.add(CudaLauncher)
        make = CudaLauncher.__init__

        @wraps(make)
        def one_at_a_time(self: Any, *arguments: Any, **options: Any) -> None:
            with _lock:
                make(self, *arguments, **options)

        CudaLauncher.__init__ = one_at_a_time
