"""Work beside a graph capture that another thread has begun.

By default CUDA ends a capture with an error when any thread of the process allocates, frees or
waits meanwhile. A thread that has nothing to do with the capture may say so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def leave_captures_alone() -> None:
    """For the rest of this thread's life its calls and other threads' captures do not meet."""
    driver = _driver()
    _exchange(driver, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)


@contextmanager
def beside_captures() -> Iterator[None]:
    """The same for one block."""
    driver = _driver()
    before = _exchange(driver, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        yield
    finally:
        _exchange(driver, before)


def _exchange(driver: Any, mode: Any) -> Any:
    result, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode: {result}")
    return before
