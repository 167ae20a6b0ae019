"""With which blocks the paged kernels run. Needs no GPU and no Triton.

What was measured to choose so: docs/performance.md.
"""

from dataclasses import dataclass
from typing import Literal

from indexer_service.kernels.architecture import HOPPER, native_fp8

WIDEST = 64
"""Columns (rows of a request times heads) that one product of the portable kernel should have.

With more, its warps would share a row's heads, and how they do decides in which order heads are
added: a row's bits would depend on how many rows its request has.
"""


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
    """A multiprocessor; all of them should have room at once."""


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


def configurations(
    arch: int, heads: int, next_n: int, *, tensor_maps: bool
) -> tuple[Configuration, ...]:
    """The configurations that may be the fastest; the first is the best guess.

    Args:
        heads: Columns.heads.
        tensor_maps: whether SM90's copy engine can read the cache: its pages are aligned.
    """
    # Decoding keys that are loaded in small pieces takes registers too.
    wide = heads <= WIDEST and (tensor_maps or native_fp8(arch))
    portable = Configuration("portable", 128 if wide else 64, 4, 3, 2)
    queries = heads * next_n
    if arch != HOPPER or not tensor_maps or queries > (256 if heads > WIDEST else 512):
        return (portable,)  # SM90's kernel keeps a request's queries in shared memory
    if heads > WIDEST:
        return Configuration("hopper", 64, 4, 3, 3 if next_n == 1 else 2), portable
    if next_n > 1:
        programs = 4 if queries <= 128 and next_n <= 4 else 3 if queries <= 256 else 2
        return Configuration("hopper", 64, 4, 3, programs), portable
    if heads > WIDEST // 2:
        # Five programs with tiles of 128 keys would not have the registers.
        return (
            Configuration("hopper", 64, 4, 3, 5),
            Configuration("hopper", 128, 4, 2, 4),
            portable,
        )
    return Configuration("hopper", 128, 4, 2, 5), Configuration("hopper", 128, 4, 3, 3), portable
