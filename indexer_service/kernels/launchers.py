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
_mine = threading.local()
_made_safe: set[type] = set()


def make_one_at_a_time() -> None:
    """In this process, from now on; a second time does nothing. Without a GPU's Triton neither.

    Before threads make kernels: those of a warm-up, and those of sessions beside each other. The C
    compiler still runs for several of them at once.
    """
    try:
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.runtime import build
    except ImportError:
        return
    with _lock:
        if CudaLauncher in _made_safe:
            return
        _made_safe.add(CudaLauncher)
        make, compile_c = CudaLauncher.__init__, build._build

        @wraps(make)
        def one_at_a_time(self: Any, *arguments: Any, **options: Any) -> None:
            with _lock:
                _mine.held = True
                try:
                    make(self, *arguments, **options)
                finally:
                    _mine.held = False

        @wraps(compile_c)
        def beside_others(*arguments: Any, **options: Any) -> Any:
            """Nothing is loaded before it is done: only from then on is the lock needed."""
            if not getattr(_mine, "held", False):
                return compile_c(*arguments, **options)
            _lock.release()
            try:
                return compile_c(*arguments, **options)
            finally:
                _lock.acquire()

        CudaLauncher.__init__ = one_at_a_time
        build._build = beside_others
