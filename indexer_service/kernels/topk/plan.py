"""How rows are divided among programs, and which kernels exist. Needs no GPU and no Triton."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Constants of a compiled kernel: elements, but for `warps`."""

    warps: int
    registers: int
    """Of a program: its warps, and registers of a thread."""
    block: int
    """Scores of a long row that are streamed at a time."""
    sample: int
    """Scores of a long row that its pivot is guessed from."""
    tile: int
    """Candidates that are selected from in registers."""
    small: int = 8192
    """Rows of up to so many scores are all candidates."""
    capacity: int = 8192
    """Candidates that a split can keep."""
    streams_nan: bool = True
    """There is a register left to note NaN in while a row is streamed; otherwise that takes another
    look at it."""


@dataclass(frozen=True)
class Plan:
    """How one call is computed."""

    sizes: Sizes
    splits: int
    """Programs that share a row."""
    programs: int
    """Of the launch, for each split: as many as rows, or fewer that take rows in turns."""
    groups: int
    """GROUP * groups candidates are what a split keeps; one with more has its row read again."""

    @property
    def capacity(self) -> int:
        return GROUP * self.groups


SHORTEST = Sizes(
    warps=8, registers=128, block=4096, sample=2048, tile=4096, small=4096, streams_nan=False
)
SHORT = Sizes(warps=8, registers=128, block=4096, sample=2048, tile=8192)
"""Two programs have room on a multiprocessor."""
STREAMED = Sizes(warps=16, registers=128, block=8192, sample=2048, tile=8192)
"""For rows that are too long to be selected from in registers."""
LONG = Sizes(warps=16, registers=128, block=4096, sample=8192, tile=16384, small=16384)
"""For rows that just fit, and for so long ones (or so large k) that a larger sample is needed."""
CONFIGURATIONS = (SHORTEST, SHORT, STREAMED, LONG)
"""Every kernel that `choose` can ask for."""

LENGTHS = (SHORTEST.small, SHORT.small, LONG.small, LONG.small + 1)
"""With any k, rows as long as these need every kernel that longer and shorter ones do."""

SHORT_OF_REGISTERS = 120
"""From this architecture on an epilogue would make the kernels spill."""

NAN_APART = (86, 89)
"""For these architectures the compiler spills registers if NaN is noted by whoever selects: a
kernel of its own looks at the rows."""

MOST_SPLITS = 64
MOST_PROGRAMS = 512
"""Of a launch: its memory for candidates does not grow with the rows."""

GROUP = 4
"""Candidates are laid out by so many: 16 bytes."""

MARGIN = 4.5
"""Standard deviations by which a pivot is lower than the k-th largest score's expected place."""

_BYTES_PER_CANDIDATE = 8
_BYTES_PER_COUNT = 4


def choose(rows: int, longest: int, k: int, *, processors: int) -> Plan:
    """The plan for so many rows, none longer than `longest`."""
    if longest <= SHORTEST.small:
        sizes = SHORTEST
    elif longest <= SHORT.small:
        sizes = SHORT
    elif longest > LONG.small and most_candidates(longest, k, STREAMED) <= STREAMED.tile:
        sizes = STREAMED
    else:
        sizes = LONG
    listed = sizes.small < longest and k <= sizes.capacity
    groups = -(-min(sizes.capacity, longest) // GROUP) if listed else 1
    useful = -(-longest // sizes.block) if longest > sizes.small else 1
    splits = min(MOST_SPLITS, useful, max(1, processors // rows))
    programs = rows if splits > 1 else min(rows, 2 * processors, MOST_PROGRAMS)
    return Plan(sizes, splits, programs, groups)


def candidate_bytes(rows: int, longest: int, k: int, *, processors: int) -> int:
    """Memory that a call with these arguments needs besides its own."""
    if not rows:
        return 0
    plan = choose(rows, longest, k, processors=processors)
    return plan.programs * plan.splits * (plan.capacity * _BYTES_PER_CANDIDATE + _BYTES_PER_COUNT)


def most_candidates(length: int, k: int, sizes: Sizes) -> float:
    """Scores that most probably no more of reach the pivot of a row that long."""
    if length <= sizes.small:
        return 0
    expected = k * sizes.sample / length
    rank = expected + MARGIN * math.sqrt(expected)
    return length / sizes.sample * (rank + MARGIN * math.sqrt(rank))
