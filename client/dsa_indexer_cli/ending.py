"""Signals that end a program: what it has started is ended first."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, and the terminal's end."""


@contextmanager
def when_asked_to_end(
    handle: Callable[[int, FrameType | None], object],
    signals: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Within the block these signals call `handle`. In the main thread only."""
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def any_end_as_by_ctrl_c() -> Iterator[None]:
    """KeyboardInterrupt, whichever of them comes: what is in the way of it is left in order."""
    with when_asked_to_end(signal.default_int_handler):
        yield
