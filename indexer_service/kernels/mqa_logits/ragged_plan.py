"""Which kernel scores ragged keys, with which tiles. Needs no GPU and no Triton.

What was measured to choose so: docs/performance.md.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from indexer_service.kernels import tuning
from indexer_service.kernels.architecture import HOPPER, native_fp8

OPERATION = "mqa_logits.ragged"

MOST_BLOCK_ROWS = 32
"""Rows that a program goes through at the most: where rows see few keys, some programs have
nothing to do, and the others must not be long."""

_START_COST = 3
"""What it costs to start a program, in groups of rows that are multiplied at once."""


@dataclass(frozen=True)
class Configuration:
    """How a program is cut. None of it changes a score's bits."""

    form: Literal["portable", "hopper"]
    keys: int
    """Keys a program."""
    columns: int
    """Rows times heads that are multiplied at once; more heads than that are one row."""
    stages: int
    """Such groups of rows in shared memory, on their way or used."""
    warps: int
    programs: int
    """Programs that share a multiprocessor."""
    overlap: bool = False

    def rows(self, heads: int) -> int:
        """Rows that are multiplied at once."""
        return max(1, self.columns // heads)


_WIDE = Configuration("portable", keys=64, columns=0, stages=1, warps=4, programs=1)
"""For more heads, or longer ones, than any model is known to have."""

_HOPPER = (
    Configuration("hopper", keys=512, columns=128, stages=2, warps=4, programs=2, overlap=True),
    Configuration("hopper", keys=256, columns=128, stages=2, warps=4, programs=3),
)
_HOPPER_FEW_KEYS = 8192
"""Up to so many keys the second: wide tiles would be too few to share out evenly."""

_NATIVE = (
    Configuration("portable", keys=128, columns=64, stages=3, warps=4, programs=3),
    Configuration("portable", keys=256, columns=64, stages=2, warps=8, programs=2),
)
_DECODED = (
    Configuration("portable", keys=256, columns=64, stages=2, warps=8, programs=2),
    Configuration("portable", keys=128, columns=64, stages=2, warps=4, programs=3),
)

LARGEST_ROW = 1 << 15
"""Heads times dimension of a row, both rounded up to a power of two, are at most this."""


def configurations(arch: int, heads: int = 64, dim: int = 128) -> tuple[Configuration, ...]:
    """All that an architecture may use, the preferred first."""
    if heads > 128 or dim > 128:
        return (_WIDE,)
    if arch == HOPPER:
        return _HOPPER
    return _NATIVE if native_fp8(arch) else _DECODED


def key(arch: int, heads: int) -> dict[str, Hashable]:
    """What a choice among `configurations` is made for, as `tuning` takes it."""
    return {"arch": arch, "heads": heads}


def chosen(arch: int, heads: int, dim: int, keys: int) -> Configuration:
    """What was tuned, else the first of `configurations`, but narrow tiles for few keys."""
    offered = configurations(arch, heads, dim)
    if offered is _HOPPER and keys <= _HOPPER_FEW_KEYS:
        return offered[1]
    if len(offered) == 1:
        return offered[0]
    return tuning.chosen(OPERATION, key(arch, heads), offered[0])


@lru_cache
def block_rows(rows: int, tiles: int, together: int, room: int) -> int:
    """Rows a program, so that programs fill the GPU evenly, and starting them costs little.

    Args:
        tiles: of keys. together: rows that are multiplied at once.
        room: programs that run at the same time.
    """

    def cost(groups: int) -> int:
        programs = tiles * -(-rows // (groups * together))
        return -(-programs // room) * (groups + _START_COST)

    most = max(1, min(MOST_BLOCK_ROWS, rows) // together)
    return together * min(range(1, most + 1), key=lambda groups: (cost(groups), groups))
