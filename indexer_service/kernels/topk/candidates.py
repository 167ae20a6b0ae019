"""Which of a long row's scores can be among its k largest: device functions.

Every split of a row guesses the same pivot from the same sample of it, streams its own part of
the row once, and keeps what reaches the pivot: first `capacity` scores (fp32), then `capacity`
indices (int32), in order of the row.
"""

import triton
import triton.language as tl

from indexer_service.kernels.topk import plan
from indexer_service.kernels.topk.tile import NEVER, classify, keys_of, scatter, score_of

GROUP = tl.constexpr(plan.GROUP)
"""Candidates of a split are filled up to a multiple of this with scores that are never chosen."""

MARGIN = tl.constexpr(4.5)
"""Standard deviations that the pivot's rank in the sample lies above what is expected."""

SLACK = tl.constexpr(8)
"""The pivot's rank in the sample may be so much more: finding it is then quicker."""


@triton.jit
def load_scores(base, at, first, end, whole, N: tl.constexpr):
    """Scores at + (0, ..., N-1) of the row, NEVER before `first` and from `end` on.

    base: aligned to 16 bytes. whole: vectors of four that are partly outside can be read.
    """
    position = at + tl.arange(0, N)
    inside = (position >= first) & (position < end)
    pointer = base + tl.max_contiguous(tl.multiple_of(position, 4), 4)
    if whole:
        vector = (position // 4 * 4 < end) & (position // 4 * 4 > first - 4)
        scores = tl.load(pointer, mask=tl.max_constancy(vector, 4), other=NEVER)
    else:
        scores = tl.load(pointer, mask=inside, other=NEVER)
    return tl.where(inside, scores, NEVER)


@triton.jit
def guess_pivot(row, length, k, SAMPLE: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr):
    """A score that most probably a few more than k of the row's `length` scores reach."""
    i = tl.arange(0, SAMPLE)
    # One from each of SAMPLE equal parts, at a place that no period of the row can follow.
    stride = length // SAMPLE
    scrambled = (i.to(tl.uint32) * 2654435761) >> 16
    jitter = (scrambled.to(tl.int64) * stride) >> 16
    keys = keys_of(tl.load(row + i.to(tl.int64) * stride + jitter))
    expected = k.to(tl.float32) * (SAMPLE / length.to(tl.float32))
    rank = (expected + MARGIN * tl.sqrt(expected) + 4.0).to(tl.int32)
    verdict = classify(keys, rank, SLACK, SAMPLE, WARPS, PTX)
    chosen = (verdict & 3) > 0
    lowest = tl.min(tl.where(chosen, keys, 0xFFFFFFFF).to(tl.uint32), 0)
    rest = tl.max(tl.where(chosen, 0, keys).to(tl.uint32), 0)
    # A sample of which all are wanted says nothing about the scores below it.
    return score_of(tl.where(rest == 0, 0, lowest).to(tl.uint32))


@triton.jit
def keep_candidates(
    base, scores, at, first, end, whole, pivot, kept, capacity, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Stream positions at, ..., end-1 and keep what reaches the pivot; returns how many do.

    scores: the first block, already loaded. first: where the row's index 0 is. More than
    `capacity` are counted, not kept.
    """
    count = tl.full((), 0, tl.int32)
    for block in range(at, end, BLOCK):
        following = load_scores(base, block + BLOCK, first, end, whole, BLOCK)
        taken = scores >= pivot
        number = tl.sum(taken.to(tl.int32), 0)
        slot = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        taken = taken & (slot < capacity)
        scatter(kept + slot, scores, taken, PTX)
        index = block + tl.arange(0, BLOCK) - first
        scatter(_indices(kept, capacity) + slot, index, taken, PTX)
        count += number
        scores = following
    filler = count + tl.arange(0, GROUP)
    tl.store(kept + filler, NEVER, mask=filler < tl.minimum(filled_up(count), capacity))
    return count


@triton.jit
def _indices(kept, capacity):
    """Where the indices of a split's candidates are."""
    return (kept + capacity).to(tl.pointer_type(tl.int32))


@triton.jit
def filled_up(count):
    """The number of places that so many candidates take."""
    return (count + GROUP - 1) // GROUP * GROUP


@triton.jit
def load_candidates(kept, counts, splits, capacity, N: tl.constexpr):
    """All splits' candidates, one after the other, in N places: scores and indices."""
    group = tl.arange(0, N // GROUP) * GROUP
    offset = tl.zeros((N // GROUP,), tl.int32)
    begin = tl.full((), 0, tl.int32)
    for split in range(splits):
        offset = tl.where(group >= begin, split * 2 * capacity - begin, offset)
        begin += filled_up(tl.load(counts + split))
    slot = (group + offset)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (group < begin)[:, None] & (tl.arange(0, GROUP)[None, :] >= 0)
    scores = tl.load(kept + slot, mask=inside, other=NEVER)
    index = tl.load(_indices(kept, capacity) + slot, mask=inside, other=0)
    return tl.reshape(scores, (N,)), tl.reshape(index, (N,))
