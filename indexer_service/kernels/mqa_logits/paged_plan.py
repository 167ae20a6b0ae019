"""With which blocks the paged kernels run. Needs no GPU and no Triton.

What was measured to choose so: docs/performance.md.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from indexer_service.kernels import tuning
from indexer_service.kernels.architecture import HOPPER, native_fp8

OPERATION = "mqa_logits.paged"

WIDEST = 128
"""Columns (rows of a request times heads) that one matrix product of the portable kernel takes."""

LENGTHS_AT_ONCE = 128
"""Requests whose lengths a program reads together."""


@dataclass(frozen=True)
class Configuration:
    """How the work is cut. No score's bits depend on it, on one architecture."""

    kernel: Literal["portable", "hopper"]
    block_keys: int
    """Keys of a tile; divides packed.PADDING."""
    warps: int
    stages: int
    """Tiles of keys in shared memory."""
    programs: int
    """A multiprocessor."""


@dataclass(frozen=True)
class Columns:
    """How rows and heads lie in a matrix product's short side."""

    heads: int
    """Of a row, with padding: a power of two."""
    rows: int
    """Of a request, together in one product."""
    groups: int
    """So many products for all rows of a request."""


def columns(heads: int, next_n: int) -> Columns:
    padded = max(16, 1 << (heads - 1).bit_length())
    rows = min(1 << (next_n - 1).bit_length(), max(1, WIDEST // padded))
    return Columns(padded, rows, -(-next_n // rows))


def configurations(arch: int, width: int, *, tensor_maps: bool) -> tuple[Configuration, ...]:
    """The configurations that were tuned over; the first is used.

    Args:
        width: Columns.rows times Columns.heads.
        tensor_maps: whether the cache is aligned so that the copy engine of SM90 can read it.
    """
    if arch == HOPPER:
        portable = (
            Configuration("portable", 64, 4, 4, 4),
            Configuration("portable", 128, 4, 4, 2),
            Configuration("portable", 128, 8, 4, 2),
        )
        return portable
    if not native_fp8(arch):
        return (Configuration("portable", 64, 4, 4, 2),)
    return (Configuration("portable", 64, 4, 4, 3),)


def key(arch: int, width: int, *, tensor_maps: bool) -> dict[str, Hashable]:
    """The arguments of `configurations` as `tuning` takes them."""
    return {"arch": arch, "width": width, "tensor_maps": tensor_maps}


def chosen(arch: int, width: int, *, tensor_maps: bool) -> Configuration:
    """What was tuned, else the first of `configurations`."""
    first = configurations(arch, width, tensor_maps=tensor_maps)[0]
    return tuning.chosen(OPERATION, key(arch, width, tensor_maps=tensor_maps), first)
