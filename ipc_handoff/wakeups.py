"""Waking a peer that sleeps: eventfds. They carry no data; the doorbell words do.

The ringer writes its word first and then rings; the sleeper tests the word after every
wake-up. Ringing always makes the system call: to skip it when nobody sleeps would need an
order between a store and a load that no processor gives for free. A peer could make ringing
block (it shares the eventfd's flags and counter): only the service's own user opens sessions,
and is trusted with that.
"""

import os
import select
from collections.abc import Iterable
from contextlib import suppress

from ipc_handoff.errors import RegionError

_EVENTFD_LINK = "anon_inode:[eventfd]"


class Wakeup:
    """One eventfd. `Wakeup()` makes one, `Wakeup(fd)` takes over a descriptor sent by a peer."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        elif os.readlink(f"/proc/self/fd/{descriptor}") != _EVENTFD_LINK:
            os.close(descriptor)
            raise RegionError("wakeup: not an eventfd (fix: send one made with eventfd(2))")
        else:
            os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor

    def fileno(self) -> int:
        if self._descriptor is None:
            raise ValueError("the wake-up is closed")
        return self._descriptor

    def ring(self) -> None:
        # A full counter means that the sleeper has not looked yet: it will.
        with suppress(BlockingIOError):
            os.eventfd_write(self.fileno(), 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sleep_until_any(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Sleep until a descriptor is readable or the time is over; the readable ones.

    Raises:
        ValueError: a descriptor is closed: it would wake every sleep at once.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    awake = poll.poll(max(0.0, seconds) * 1000)
    for descriptor, events in awake:
        if events & select.POLLNVAL:
            raise ValueError(f"descriptor {descriptor} is closed")
    return [descriptor for descriptor, _ in awake]
