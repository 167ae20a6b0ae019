"""Selection from a few thousand scores by one program: a device function."""

import triton
import triton.language as tl

from indexer_service.kernels.topk.candidates import load_candidates, load_scores, tell_nan
from indexer_service.kernels.topk.ptx_tile import select as select_ptx
from indexer_service.kernels.topk.tile import keys_of, places, threshold


@triton.jit
def select_from_tile(
    base, first, end, k, shift, out, counts, lists, capacity, nan, mark, TILE: tl.constexpr,
    WARPS: tl.constexpr, NAN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write the indices of the k largest scores, plus `shift`, and -1 after them.

    lists 0: of a row with position 0 at `base` (aligned to 16 bytes), its index 0 at position
    `first`, ending before position `end`. Otherwise of so many lists of candidates, the first of
    them at `base`, which together take `end` places. end <= TILE. NAN: int32 `nan` becomes at least
    `mark` if a score of the row is NaN.
    """
    if PTX:
        tl.inline_asm_elementwise(
            select_ptx(TILE, WARPS, NAN), "=r,l,r,r,r,r,l,l,r,r,l,r,~{memory}",
            [base.to(tl.int64), first, end, k, shift, out.to(tl.int64), counts.to(tl.int64),
             lists, capacity, nan.to(tl.int64), mark],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        if lists == 0:
            scores = load_scores(base, 0, first, end, TILE)
            index = tl.arange(0, TILE) - first
            if NAN:
                tell_nan(scores, nan, mark)
        else:
            scores, index = load_candidates(base, counts, lists, capacity, TILE)
        keys = keys_of(scores)
        low, need = threshold(keys, k, 0)
        chosen, before = places(keys, low, need)
        tl.store(out + before, index + shift, mask=chosen)
        fill(out, tl.sum(chosen.to(tl.int32), 0), k)


@triton.jit
def fill(out, written, k):
    """-1 from place `written` on."""
    for at in range(written, k, 1024):
        place = at + tl.arange(0, 1024)
        tl.store(out + place, -1, mask=place < k)
