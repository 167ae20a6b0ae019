"""How rows are divided among programs, and which kernels exist. Needs no GPU and no Triton."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Constants of a compiled kernel: elements, but for `warps`."""

    warps: int
    """Of a program."""
    block: int
    """Scores of a long row that are streamed at a time."""
    sample: int
    """Scores of a long row that its pivot is guessed from."""
    small: int = 8192
    """So many are selected from in registers."""


@dataclass(frozen=True)
class Plan:
    """How one call is computed."""

    sizes: Sizes
    splits: int
    """Programs that share a row; more than one only if all rows' programs start at once."""
    programs: int
    """Of the launch, which take the rows' splits in turns."""
    groups: int
    """GROUP * groups candidates are what a split keeps; one with more has its row read again."""

    @property
    def capacity(self) -> int:
        return GROUP * self.groups


FEW_ROWS = Sizes(warps=8, block=4096, sample=4096)
MANY_ROWS = Sizes(warps=8, block=4096, sample=2048)
CONFIGURATIONS = (FEW_ROWS, MANY_ROWS)
"""Every kernel that `choose` can ask for."""

MOST_SPLITS = 64
MOST_PROGRAMS = 512
"""Of a launch: its memory for candidates does not grow with the rows."""

GROUP = 4
"""Candidates are laid out by so many: 16 bytes."""

_CAPACITY = 8192
_PROGRAMS_A_PROCESSOR = 3
_BYTES_PER_CANDIDATE = 8


def choose(rows: int, longest: int, *, processors: int) -> Plan:
    """The plan for so many rows, none longer than `longest`."""
    groups = -(-min(_CAPACITY, longest) // GROUP) if longest > FEW_ROWS.small else 1
    if rows >= 2 * processors:
        programs = min(rows, _PROGRAMS_A_PROCESSOR * processors, MOST_PROGRAMS)
        return Plan(MANY_ROWS, 1, programs, groups)
    useful = max(1, -(-longest // FEW_ROWS.block))
    splits = min(MOST_SPLITS, useful, max(1, processors // rows))
    programs = min(rows * splits, MOST_PROGRAMS)
    return Plan(FEW_ROWS, splits, programs, groups)


def candidate_bytes(plan: Plan) -> int:
    """Memory that a call needs besides its arguments."""
    return plan.programs * plan.capacity * _BYTES_PER_CANDIDATE
