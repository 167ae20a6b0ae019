"""Open descriptors, each with its file, so that a test counts its own and nobody else's.

Other threads of the process (gRPC's, those of an earlier test) open and close descriptors at any
moment, and the collector closes what earlier tests left behind: a mere number says nothing.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.waiting import SOON, eventually

_EVENTFD_ID = "eventfd-id:"
# Most of what goes, goes at once; only then is the collector asked, which takes longer.
_AT_ONCE = 0.5


@dataclass(frozen=True)
class Descriptor:
    """A number, and the file that it refers to: equal for duplicates, and for nothing else."""

    number: int
    file: str


def descriptors() -> set[Descriptor]:
    """What this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, and what was closed meanwhile
            found.add(Descriptor(int(name), _file_of(int(name))))
    return found


def copies_of(number: int) -> int:
    """How many descriptors of this process refer to the file of an open one, itself included."""
    file = _file_of(number)
    return sum(descriptor.file == file for descriptor in descriptors())


def _file_of(number: int) -> str:
    path = f"/proc/self/fd/{number}"
    file = f"{os.readlink(path)} {os.stat(path).st_ino}"
    if "eventfd" not in file:
        return file
    # All of them share an inode.
    with open(f"/proc/self/fdinfo/{number}") as info:
        return file + "".join(line.strip() for line in info if line.startswith(_EVENTFD_ID))


@contextmanager
def no_descriptor_leaks(seconds: float = SOON) -> Iterator[None]:
    """The block leaves no descriptor open that was not open before, or for `seconds` at most."""
    before = descriptors()
    yield
    if not eventually(lambda: descriptors() <= before, min(_AT_ONCE, seconds)):
        gc.collect()
        left: set[Descriptor] = set()

        def nothing_left() -> bool:
            nonlocal left
            left = descriptors() - before
            return not left

        assert eventually(nothing_left, seconds), f"descriptors left open: {left}"
