"""The k largest scores of each row: one kernel, any row length, any k.

A row of a few thousand scores is selected from in registers. Of a longer one, every split reads
the same sample of the row and guesses from it a pivot that a few more than k scores should reach;
it streams its part of the row once and keeps the candidates, in order, in its own memory. The
split that is the last to arrive selects from all candidates. Too few of them (the sample
misled), or too many to keep: that program reads the row again, as often as it takes.

Nobody waits for another program, and what is chosen depends on nothing but the row.
"""

import triton
import triton.language as tl

from indexer_service.kernels.topk.candidates import (
    GROUP,
    filled_up,
    guess_pivot,
    keep_candidates,
    load_candidates,
    load_scores,
)
from indexer_service.kernels.topk.memory import select_from_memory
from indexer_service.kernels.topk.tile import LOWEST, classify, keys_of, places, scatter

UNSPECIALISED = (
    "given", "k", "width", "rows", "splits", "groups", "limit", "skew", "scores_stride",
    "out_stride",
)  # fmt: skip
"""Numbers whose values must not make new kernels."""

POINTERS = ("scores", "row_at", "row_start", "row_end", "arrived", "enabled", "out")
"""Pointers whose alignment must not."""

ROW_AT = tl.constexpr(1)
ROW_START = tl.constexpr(2)
ROW_END = tl.constexpr(4)
ENABLED = tl.constexpr(8)
"""Bits of `given`."""

NOTHING = tl.constexpr(0)
ROW = tl.constexpr(1)
CANDIDATES = tl.constexpr(2)
ROW_IN_MEMORY = tl.constexpr(3)
CANDIDATES_IN_MEMORY = tl.constexpr(4)
"""What a program selects from."""


@triton.jit
def _bounds(row, row_at, row_start, row_end, given, width, scores_stride):
    """Where a row begins (negative: leave it alone), its length, what to add to its indices."""
    end = tl.load(row_end + row, mask=(given & ROW_END) != 0, other=width)
    start = tl.load(row_at + row, mask=(given & ROW_AT) != 0, other=0)
    shift = tl.full((), 0, tl.int32)
    if (given & ROW_AT) == 0:
        asked = tl.load(row_start + row, mask=(given & ROW_START) != 0, other=0)
        begin = tl.minimum(tl.maximum(asked, 0), width)
        end = tl.minimum(tl.maximum(end, 0), width) - begin
        start = row.to(tl.int64) * scores_stride + begin
        shift = begin - asked
    return start, end, shift


@triton.jit
def _select_from_tile(
    source, base, first, end, whole, kept, counts, splits, capacity, k, shift, out,
    N: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Select in registers, from a row or from its candidates, N at most; returns how many."""
    if source == ROW:
        scores = load_scores(base, 0, first, end, whole, N)
        index = tl.arange(0, N) - first
    else:
        scores, index = load_candidates(kept, counts, splits, capacity, N)
    chosen, before = places(classify(keys_of(scores), k, 0, N, WARPS, PTX))
    scatter(out + before, index + shift, chosen, PTX)
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=POINTERS)
def topk_kernel(
    scores, row_at, row_start, row_end, arrived, enabled, out, candidates, counts, given, k, width,
    rows, splits, groups, limit: tl.int64, skew, scores_stride: tl.int64, out_stride: tl.int64,
    SMALL: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, MOST_SPLITS: tl.constexpr,
    WARPS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Indices of the k largest scores of each row, ascending, -1 at the tail.

    scores: fp32, `skew` elements after an address of 16 bytes, from where `limit` elements can be
    read. given: which of the optional arguments there are.
    With row_at (int64 [rows]) row r is scores[row_at[r], + row_end[r]); a negative row_at leaves
    the row alone. Without, it is columns [row_start[r], row_end[r]) of [0, width), at
    r * scores_stride, and indices count from row_start[r]. enabled: int32 [1], 0: do nothing.
    arrived: int32 [rows], zero, and so again at the end. candidates: fp32 [programs, 2,
    GROUP * groups], counts: int32 [programs]. Programs take the rows' splits in turns; if a row has more than
    one, every program has one.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    on = tl.load(enabled, mask=(given & ENABLED) != 0, other=1) != 0
    items = tl.where(on, rows * splits, 0)
    program = tl.program_id(0)
    capacity = groups * GROUP
    for item in range(program, items, tl.num_programs(0)):
        row = item // splits
        split = item % splits
        start, length, shift = _bounds(row, row_at, row_start, row_end, given, width, scores_stride)
        present = start >= 0
        # The row begins `first` scores after an address of 16 bytes: positions count from there.
        start += skew
        first = (start & 3).to(tl.int32)
        aligned = start - first
        base = tl.multiple_of(scores - skew, 16) + tl.multiple_of(aligned, 4)
        length = tl.maximum(length, 0)
        end = first + length
        whole = (aligned >= skew) & (aligned + (end + 3) // 4 * 4 <= limit)
        to = out + row.to(tl.int64) * out_stride
        per_split = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK), splits), 1) * BLOCK
        active = tl.cdiv(end, per_split)
        kept = candidates + (program - split).to(tl.int64) * (2 * capacity)
        kept_counts = counts + (program - split)

        source = tl.full((), NOTHING, tl.int32)
        entries = end
        if present & (split == 0) & (end <= SMALL):
            source = tl.full((), ROW, tl.int32)
        if present & (split == 0) & (end > SMALL) & (k > capacity):
            source = tl.full((), ROW_IN_MEMORY, tl.int32)
        if present & (split < active) & (end > SMALL) & (k <= capacity):
            at = split * per_split
            until = tl.minimum(at + per_split, end)
            head = load_scores(base, at, first, until, whole, BLOCK)
            pivot = guess_pivot(base + first, length, k, SAMPLE, WARPS, PTX)
            count = keep_candidates(
                base, head, at, first, until, whole, pivot, kept + split * 2 * capacity, capacity,
                BLOCK, PTX,
            )  # fmt: skip
            tl.store(kept_counts + split, count)
            tl.debug_barrier()  # all threads' candidates, before one thread tells
            others = tl.full((), 0, tl.int32)
            if splits > 1:
                others = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
            if others == active - 1:
                if splits > 1:
                    tl.store(arrived + row, 0)
                s = tl.arange(0, MOST_SPLITS)
                number = tl.load(kept_counts + s, mask=s < active, other=0)
                entries = tl.sum(filled_up(number), 0)
                enough = (tl.sum(number, 0) >= k) | (pivot == LOWEST)
                if enough & (tl.max(number, 0) <= capacity):
                    source = tl.where(entries <= SMALL, CANDIDATES, CANDIDATES_IN_MEMORY)
                else:
                    source = tl.full((), ROW_IN_MEMORY, tl.int32)

        written = tl.full((), 0, tl.int32)
        if (source == ROW) | (source == CANDIDATES):
            if entries <= SMALL // 4:
                written = _select_from_tile(
                    source, base, first, end, whole, kept, kept_counts, active, capacity, k,
                    shift, to, SMALL // 4, WARPS, PTX,
                )  # fmt: skip
            elif entries <= SMALL // 2:
                written = _select_from_tile(
                    source, base, first, end, whole, kept, kept_counts, active, capacity, k,
                    shift, to, SMALL // 2, WARPS, PTX,
                )  # fmt: skip
            else:
                written = _select_from_tile(
                    source, base, first, end, whole, kept, kept_counts, active, capacity, k,
                    shift, to, SMALL, WARPS, PTX,
                )  # fmt: skip
        if source == CANDIDATES_IN_MEMORY:
            written = select_from_memory(
                kept, kept_counts, active, 0, capacity, k, shift, to, BLOCK // 2, True, PTX
            )
        if source == ROW_IN_MEMORY:
            written = select_from_memory(
                base + first, kept_counts, 1, length, capacity, k, shift, to, BLOCK // 2, False,
                PTX,
            )  # fmt: skip
        if source != NOTHING:
            for at in range(written, k, 1024):
                place = at + tl.arange(0, 1024)
                tl.store(to + place, -1, mask=place < k)
        # The next row's candidates go where this one's are still being read.
        tl.debug_barrier()
