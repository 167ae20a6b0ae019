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
    count_candidates,
    find_candidates,
)
from indexer_service.kernels.topk.memory import select_from_memory, tell_nan_in_memory
from indexer_service.kernels.topk.selection import select_from_tile

UNSPECIALISED = (
    "given", "k", "width", "rows", "groups", "skew", "scores_stride", "out_stride", "mark",
)  # fmt: skip
"""Numbers whose values must not make new kernels."""

POINTERS = ("scores", "row_at", "row_start", "row_end", "arrived", "enabled", "out", "nan")
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
def asked(row, rows, row_at, row_start, row_end, given, width):
    """What the arguments say about a row, or what stands for it where they do not. Of a row that
    is not there nothing is read: a program must not wait for that at its end.
    """
    inside = row < rows
    at = tl.load(row_at + row, mask=inside & ((given & ROW_AT) != 0), other=0)
    start = tl.load(row_start + row, mask=inside & ((given & ROW_START) != 0), other=0)
    end = tl.load(row_end + row, mask=inside & ((given & ROW_END) != 0), other=width)
    return at, start, end


@triton.jit
def bounds(row, at, start, end, given, width, scores_stride):
    """Where a row begins (negative: leave it alone), its length, what to add to its indices."""
    shift = tl.full((), 0, tl.int32)
    if (given & ROW_AT) == 0:
        begin = tl.minimum(tl.maximum(start, 0), width)
        end = tl.minimum(tl.maximum(end, 0), width) - begin
        at = tl.cast(row, tl.int64) * scores_stride + begin
        shift = begin - start
    return at, tl.maximum(end, 0), shift


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=POINTERS)
def topk_kernel(
    scores, row_at, row_start, row_end, arrived, enabled, out, candidates, counts, nan, given, k,
    width, rows, groups, skew, scores_stride: tl.int64, out_stride: tl.int64, mark,
    SMALL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
    CAPACITY: tl.constexpr, MOST_SPLITS: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
    NAN: tl.constexpr, STREAMS_NAN: tl.constexpr, SETTLED: tl.constexpr,
    PDL: tl.constexpr, EPILOGUE: tl.constexpr = None, epilogue=None,
):  # fmt: skip
    """Indices of the k largest scores of each row, ascending, -1 at the tail.

    scores: fp32, `skew` elements after an address of 16 bytes. given: which of the optional
    arguments there are.
    With row_at (int64 [rows]) row r is scores[row_at[r], + row_end[r]); a negative row_at leaves
    the row alone. Without, it is columns [row_start[r], row_end[r]) of [0, width), at
    r * scores_stride, and indices count from row_start[r]. enabled: int32 [1], 0: do nothing.
    SETTLED: there is `enabled`, and it was final before the kernel two ahead of this one let the
    next one start.
    arrived: int32 [rows], zero, and so again at the end. Launched for (programs, splits): programs
    take rows in turns, and there is one for each row unless there is one split.
    candidates: fp32 [programs, splits, 2, GROUP * groups], counts: int32 [programs, splits].
    NAN: int32 `nan` becomes at least mark - r if a score of row r is NaN; STREAMS_NAN: that is seen
    while a row is streamed.
    EPILOGUE: called as EPILOGUE(programs, PTX, *epilogue) by `programs` programs, each when it has
    stored its rows, unless `enabled` is 0; whoever is the last of them comes behind all stores.
    """
    if SETTLED:
        if PDL:
            # Who comes next waits by itself, and must not come late because of a look at memory.
            tl.extra.cuda.gdc_launch_dependents()
        if tl.load(enabled, volatile=True) == 0:
            return
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Launching the next kernel takes a while; it waits by itself for this one's end.
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    on = tl.load(enabled, mask=(given & ENABLED) != 0, other=1) != 0
    # Read side by side, and before anything is computed.
    at, start, end = asked(program, rows, row_at, row_start, row_end, given, width)
    capacity = groups * GROUP
    mine = candidates + program.to(tl.int64) * splits * (2 * capacity)
    counts_here = counts + program * splits
    if EPILOGUE is not None:
        ends = splits == 1
    for row in range(program, rows, programs):
        origin, length, shift = bounds(row, at, start, end, given, width, scores_stride)
        present = on & (origin >= 0)
        if EPILOGUE is not None:
            ends = ends | ((split == 0) & (origin < 0))
        # The row begins `first` scores after an address of 16 bytes: positions count from there.
        origin += skew
        first = (origin & 3).to(tl.int32)
        base = scores - skew + (origin - first)
        last = first + length
        to = out + tl.cast(row, tl.int64) * out_stride
        source = tl.full((), NOTHING, tl.int32)
        entries = last
        active = tl.full((), 1, tl.int32)
        per_split = last
        if (last > SMALL) & (splits > 1):
            per_split = tl.cdiv(tl.cdiv(last, BLOCK), splits) * BLOCK
            active = tl.cdiv(last, per_split)
        if present & (split == 0):
            if last <= SMALL:
                source = tl.full((), ROW, tl.int32)
            elif k > capacity:
                source = tl.full((), ROW_IN_MEMORY, tl.int32)
        if present & (split < active) & (last > SMALL) & (k <= capacity):
            begin = split * per_split
            until = tl.minimum(begin + per_split, last)
            kept = mine + split.to(tl.int64) * (2 * capacity)
            count, all_kept = find_candidates(
                base, begin, until, first, length, k, kept, groups, nan, mark - row, SAMPLE, BLOCK,
                WARPS, CAPACITY, STREAMS_NAN, PTX,
            )  # fmt: skip
            tl.store(counts_here + split, count)
            tl.debug_barrier()  # all threads' candidates, before one thread tells
            others = tl.full((), 0, tl.int32)
            if splits > 1:
                others = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
            if others == active - 1:
                if splits > 1:
                    tl.store(arrived + row, 0)
                number, entries, most = count_candidates(counts_here, active, MOST_SPLITS, PTX)
                enough = (number >= k) | all_kept
                if enough & (most <= capacity):
                    source = tl.where(entries <= TILE, CANDIDATES, CANDIDATES_IN_MEMORY)
                else:
                    source = tl.full((), ROW_IN_MEMORY, tl.int32)

        if (source == ROW) | (source == CANDIDATES):
            listed = source == CANDIDATES
            select_from_tile(
                tl.where(listed, mine, base), tl.where(listed, 0, first), entries, k, shift, to,
                counts_here, tl.where(listed, active, 0), capacity, nan, mark - row, TILE, WARPS,
                NAN, PTX,
            )  # fmt: skip
        if NAN:  # noqa: SIM102 - decided when compiling
            if present & (split == 0) & (last > SMALL) & ((k > capacity) | (not STREAMS_NAN)):
                tell_nan_in_memory(base + first, length, nan, mark - row, BLOCK // 4)
        if (source == ROW_IN_MEMORY) | (source == CANDIDATES_IN_MEMORY):
            listed = source == CANDIDATES_IN_MEMORY
            select_from_memory(
                tl.where(listed, mine, base + first), counts_here, tl.where(listed, active, 1),
                length, capacity, listed, k, shift, to, BLOCK // 4,
            )  # fmt: skip
        if EPILOGUE is not None:
            # Of the programs that share a row, who selects ends it.
            ends = ends | (source != NOTHING)
        at, start, end = asked(row + programs, rows, row_at, row_start, row_end, given, width)
        # The next row's candidates go where this one's are still being read.
        tl.debug_barrier()
    if EPILOGUE is not None:  # noqa: SIM102 - decided when compiling
        if on & ends:
            EPILOGUE(programs, PTX, *epilogue)
