"""Which of a long row's scores can be among its k largest: device functions.

Every split of a row guesses the same pivot from the same sample of it, streams its own part of
the row once, and keeps what reaches the pivot: a list in order of the row, of up to `capacity`
scores and then as many indices. PTX: as inline assembly, else in Triton.
"""

import triton
import triton.language as tl

from indexer_service.kernels.topk import plan
from indexer_service.kernels.topk.ptx_stream import candidates as candidates_ptx
from indexer_service.kernels.topk.ptx_tile import tally as tally_ptx
from indexer_service.kernels.topk.tile import LOWEST, NEVER, keys_of, score_of, threshold

GROUP = tl.constexpr(plan.GROUP)
"""Candidates of a split are filled up to a multiple of this with scores that are never chosen."""

TOGETHER = tl.constexpr(4)
"""Scores of the sample that lie next to each other, at places that no period can follow."""

MARGIN = tl.constexpr(plan.MARGIN)
"""Standard deviations that the pivot's rank in the sample lies above what is expected."""

SLACK = tl.constexpr(4)
"""The pivot's rank in the sample may be so much more: finding it is then quicker."""


@triton.jit
def load_scores(base, at, first, end, N: tl.constexpr):
    """Scores at + (0, ..., N-1) of the row, NEVER before `first` and from `end` on."""
    position = at + tl.arange(0, N)
    return tl.load(base + position, mask=(position >= first) & (position < end), other=NEVER)


@triton.jit
def tell_nan(scores, nan, mark):
    """int32 `nan` becomes at least `mark` if one of the scores is NaN."""
    if tl.max((scores != scores).to(tl.int32), 0) != 0:
        tl.atomic_max(nan, mark, sem="relaxed", scope="gpu")


@triton.jit
def find_candidates(
    base, at, until, first, length, k, kept, groups, nan, mark, SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, CAPACITY: tl.constexpr, NAN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Keep those of the scores at positions at, ..., until-1 that reach the row's pivot.

    base: of position 0, aligned to 16 bytes. first: where the row's index 0 is; it has `length`
    scores. Returns how many reach the pivot, of which the list has room for GROUP * groups <=
    CAPACITY, and whether the pivot is so low that all that may be chosen do.
    NAN: int32 `nan` becomes at least `mark` if a score is NaN.
    """
    expected = k.to(tl.float32) * (SAMPLE / length.to(tl.float32))
    rank = (expected + MARGIN * tl.sqrt(expected) + 2.0).to(tl.int32)
    stride = length // (SAMPLE // TOGETHER)
    if PTX:
        count, bits = tl.inline_asm_elementwise(
            candidates_ptx(SAMPLE, WARPS, SLACK, CAPACITY, NAN),
            "=&r,=&r,l,r,r,r,l,r,r,r,l,r,~{memory}",
            [base.to(tl.int64), at, until, first, kept.to(tl.int64), groups, stride, rank,
             nan.to(tl.int64), mark],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return count, bits.to(tl.float32, bitcast=True) == LOWEST
    else:
        i = tl.arange(0, SAMPLE).to(tl.uint32)
        part = i // TOGETHER
        jitter = tl.umulhi(part * 2654435761, (stride - TOGETHER + 1).to(tl.uint32))
        place = (part * stride.to(tl.uint32) + jitter) // TOGETHER * TOGETHER + i % TOGETHER
        keys = keys_of(tl.load(base + first + place))
        # A sample of which all are wanted says nothing about the scores below it.
        pivot = score_of(threshold(keys, rank, SLACK)[0])
        count = _keep(base, at, until, first, pivot, kept, groups * GROUP, nan, mark, NAN, BLOCK)
        return count, pivot == LOWEST


@triton.jit
def _keep(
    base, at, until, first, pivot, kept, capacity, nan, mark, NAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What `find_candidates` keeps, for this pivot."""
    count = tl.full((), 0, tl.int32)
    for block in range(at, until, BLOCK):
        scores = load_scores(base, block, first, until, BLOCK)
        if NAN:
            tell_nan(scores, nan, mark)
        taken = scores >= pivot
        slot = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        count += tl.sum(taken.to(tl.int32), 0)
        taken = taken & (slot < capacity)
        index = block + tl.arange(0, BLOCK) - first
        tl.store(kept + slot, scores, mask=taken)
        tl.store(kept + capacity + slot, index.to(tl.float32, bitcast=True), mask=taken)
    filler = count + tl.arange(0, GROUP)
    tl.store(kept + filler, NEVER, mask=filler < tl.minimum(filled_up(count), capacity))
    return count


@triton.jit
def filled_up(count):
    """The number of places that so many candidates take."""
    return (count + GROUP - 1) // GROUP * GROUP


@triton.jit
def count_candidates(counts, lists, MOST_LISTS: tl.constexpr, PTX: tl.constexpr):
    """Of all lists: candidates, the places that they take, and those of the longest list."""
    if PTX:
        return tl.inline_asm_elementwise(
            tally_ptx(), "=r,=r,=r,l,r,~{memory}", [counts.to(tl.int64), lists],
            dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        which = tl.arange(0, MOST_LISTS)
        number = tl.load(counts + which, mask=which < lists, other=0)
        return tl.sum(number, 0), tl.sum(filled_up(number), 0), tl.max(number, 0)


@triton.jit
def load_candidates(kept, counts, lists, capacity, N: tl.constexpr):
    """All lists one after the other in N places: scores and indices."""
    place = tl.arange(0, N)
    offset = tl.zeros((N,), tl.int32)
    begin = tl.full((), 0, tl.int32)
    for item in range(lists):
        offset = tl.where(place >= begin, item * 2 * capacity - begin, offset)
        begin += filled_up(tl.load(counts + item))
    score = kept + place + offset
    scores = tl.load(score, mask=place < begin, other=NEVER)
    index = tl.load(score + capacity, mask=place < begin, other=0.0)
    return scores, index.to(tl.int32, bitcast=True)
