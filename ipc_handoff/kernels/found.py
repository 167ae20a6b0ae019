"""What the worker's kernels find, told to their host without anybody waiting.

A ring of entries in pinned host memory. Nothing is written there while nothing is wrong; the host
looks at the next entry's first word when a step begins.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ipc_handoff.device import tell

ENTRIES = 4096
"""More than these between two looks of the host: the oldest ones are lost, and counted. More than
programs that a GPU holds at a time: a batch whose requests are all wrong tells of each at once, and
two programs must not write the same entry, of which the host would see a mixture, or the older one
last and then wait for the newer one.
"""


class Contradiction(IntEnum):
    """What contradicts what. Those below STALE_ANSWER are the numbers of `device_inputs`."""

    TORN_INPUT = 1
    NEGATIVE_LENGTH = 2
    LENGTH_OUT_OF_BOUNDS = 3
    PAGE_OUT_OF_BOUNDS = 4
    QUERY_OFFSETS = 5
    POSITION = 6
    SLOT = 7
    STALE_ANSWER = 8
    """Expected and seen are generations, as of OVERWRITTEN_ANSWER."""
    OVERWRITTEN_ANSWER = 9
    SHARED_INDEX_LEAK = 10
    """Expected and seen are steps."""


class Entry(NamedTuple):
    """int64 words of an entry, behind the first one, which numbers it from 1 and is written last.

    Attributes:
        ordinal: of the layer; row, request: in the batch. -1: none in particular.
    """

    kind: int
    step: int
    ordinal: int
    row: int
    request: int
    expected: int
    seen: int


WORDS = 1 + len(Entry._fields)
_ENTRIES = tl.constexpr(ENTRIES)
_WORDS = tl.constexpr(WORDS)


@triton.jit
def tell_found(
    kind, step, ordinal, row, request, expected, seen, found, entries, PTX: tl.constexpr
):  # fmt: skip
    """Write an entry: a program calls it with all its threads, and hardly ever.

    found: int64 [1], entries so far; entries: int64 [ENTRIES, WORDS].
    """
    number = tl.atomic_add(found, 1, sem="relaxed", scope="gpu")
    entry = entries + number % _ENTRIES * _WORDS
    tl.store(entry + 1, kind)
    tl.store(entry + 2, step)
    tl.store(entry + 3, ordinal)
    tl.store(entry + 4, row)
    tl.store(entry + 5, request)
    tl.store(entry + 6, expected)
    tl.store(entry + 7, seen)
    tl.debug_barrier()
    tell(entry.to(tl.int64), number + 1, PTX)


class Found:
    """Made once in a worker's life, before the first capture: graphs hold its addresses.

    Attributes:
        count: int64 [1] on the device; entries: int64 [ENTRIES, WORDS] in pinned host memory.
        lost: entries that were overwritten before the host looked.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.entries = torch.zeros(
            (ENTRIES, WORDS), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._words = self.entries.numpy()
        self._read = 0
        self.lost = 0

    def new(self) -> Iterator[Entry]:
        """Those that were written since the last call; never waits. One thread calls it."""
        while (number := self._number()) > self._read:
            _, *words = self._words[self._read % ENTRIES].tolist()
            if self._number() != number:
                continue
            if number > self._read + 1:  # the ring has come round
                lost = number - ENTRIES - self._read
                self.lost += lost
                self._read += lost
                continue
            self._read += 1
            yield Entry(*words)

    def _number(self) -> int:
        """Of the entry that stands where the next one is looked for."""
        return int(self._words[self._read % ENTRIES, 0])
