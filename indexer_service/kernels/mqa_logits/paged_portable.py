"""Paged scores on any GPU from SM80 up.

A fixed number of programs shares the tiles of BLOCK_N keys of all requests evenly: each reads the
lengths, takes its part and walks through the requests that it falls on, so that the real lengths
decide the work. Keys are the long side of the matrix product and the heads of one or more rows of
the request the short one; the next tiles' keys are on their way meanwhile.
"""

import triton
import triton.language as tl

from indexer_service.kernels.e4m3 import SCALE_OF_PRODUCTS
from indexer_service.kernels.mqa_logits.paged_heads import twice_weighted_sum
from indexer_service.kernels.mqa_logits.paged_share import (
    FAR,
    LENGTHS_AT_ONCE,
    row_length,
    seeing_request,
    share,
)
from indexer_service.kernels.mqa_logits.paged_words import decode_place

UNSPECIALISED = (
    "batch", "heads", "pages", "limit", "span", "window", "page_stride",
    "weight_row", "weight_head", "length_request", "length_row", "back", "table_row",
    "table_column", "score_row",
)  # fmt: skip
"""Numbers whose values must not make new kernels."""

UNALIGNED = ("cache", "weights", "seq_lens", "table", "scores", "row_at", "row_end", "arrived",
             "enabled")  # fmt: skip
"""Pointers whose alignment must not make new kernels."""


@triton.jit
def _pages(table, position, longest, table_column, PAGE: tl.constexpr):
    """The page of each position, -1 past the longest row."""
    at = table + (position // PAGE).to(tl.int64) * table_column
    return tl.load(at, mask=position < longest, other=-1)


@triton.jit
def _scales(cache, page, position, pages, page_stride, PAGE: tl.constexpr, D: tl.constexpr):
    """Scales of keys; NaN for pages outside the cache."""
    inside = (page >= 0) & (page < pages)
    plane = (cache + PAGE * D).to(tl.pointer_type(tl.float32))
    at = plane + page.to(tl.int64) * (page_stride // 4) + position % PAGE
    return tl.load(at, mask=inside, other=float("nan"))


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def portable_kernel(
    q, cache, weights, seq_lens, table, scores, row_at, row_end, arrived, enabled, batch,
    heads, pages, limit, span: tl.int64, window: tl.int64, page_stride: tl.int64,
    weight_row: tl.int64, weight_head: tl.int64, length_request: tl.int64, length_row: tl.int64,
    back, table_row: tl.int64, table_column: tl.int64, score_row: tl.int64,
    NEXT_N: tl.constexpr, LENGTHS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PADDING: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, NATIVE: tl.constexpr,
    ASSEMBLY: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of all requests' rows.

    q: bytes [batch, NEXT_N, heads, D], contiguous. seq_lens: LENGTHS lengths a request.
    row_at: where rows lie is for this kernel to say (see `packed`); None if row r's score of
    position s, below the row's length, goes to scores[r * score_row + s].
    enabled: int32 [1] or None; with 0 in it nothing is done. SETTLED: it was final before the
    kernel ahead let this one start, which need then not be waited for to do nothing.
    HEADS: heads with padding. A request's rows are computed in GROUPS groups of ROWS.
    ALIGN: bytes that keys are aligned to.
    """
    if SETTLED:
        if PDL:
            # Who comes next waits by itself, and must not come late because of a look at memory.
            tl.extra.cuda.gdc_launch_dependents()
        if tl.load(enabled, volatile=True) == 0:
            return
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if enabled is not None:  # noqa: SIM102 - decided when compiling
        if tl.load(enabled) == 0:
            return
    PER_UNIT: tl.constexpr = PADDING // BLOCK_N
    begin, end, request, at = share(
        tl.arange(0, LENGTHS_AT_ONCE), seq_lens, row_at, row_end, arrived, batch, limit, span,
        window, length_request, length_row, back, NEXT_N, LENGTHS, PER_UNIT * GROUPS, PADDING,
        PROGRAMS,
    )  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    word = tl.arange(0, D // 4)
    column = tl.arange(0, ROWS * HEADS)
    head = column % HEADS
    tile = begin
    while tile < end:
        request, longest = seeing_request(
            seq_lens, request, batch, length_request, length_row, limit, LENGTHS
        )  # fmt: skip
        units = tl.cdiv(longest, PADDING)
        tiles = units * PER_UNIT
        local = tile - at * (PER_UNIT * GROUPS)
        group = local // tl.maximum(tiles, 1)
        first = local - group * tiles
        stop = tl.minimum(tiles, first + end - tile)

        row_of_table = table + tl.cast(request, tl.int64) * table_row
        start = first * BLOCK_N + n
        following = _pages(row_of_table, start, longest, table_column, PAGE)
        scale_following = _scales(cache, following, start, pages, page_stride, PAGE, D)
        row = tl.cast(request, tl.int64) * NEXT_N
        j = group * ROWS + column // HEADS
        there = (j < NEXT_N) & (head < heads)
        query = q + ((row + j) * heads + head) * D
        if NATIVE:
            codes = tl.load(query[:, None] + d[None, :], mask=there[:, None], other=0)
            query0 = tl.trans(codes.to(tl.float8e4nv, bitcast=True))
        else:
            query = query.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
            words = tl.load(query, mask=there[:, None], other=0)
            query0 = tl.trans(decode_place(words, 0, ASSEMBLY))
            query1 = tl.trans(decode_place(words, 1, ASSEMBLY))
            query2 = tl.trans(decode_place(words, 2, ASSEMBLY))
            query3 = tl.trans(decode_place(words, 3, ASSEMBLY))
        weight = weights + (row + j) * weight_row + head * weight_head
        weight = tl.load(weight, mask=there, other=0.0)
        out_row = group * ROWS + tl.arange(0, ROWS)
        if row_at is not None:
            to = (tl.cast(at, tl.int64) * NEXT_N + out_row * units.to(tl.int64)) * PADDING
            to = scores + (to - window * span)
            end_of_row = tl.where(out_row < NEXT_N, FAR, 0)
        else:
            to = scores + (row + out_row) * score_row
            end_of_row = row_length(
                seq_lens, request, out_row, out_row < NEXT_N, length_request, length_row, back,
                limit, NEXT_N,
            )  # fmt: skip
            end_of_row = tl.where(out_row < NEXT_N, end_of_row, 0)

        for i in tl.range(first, stop, num_stages=STAGES):
            # Pages are read one tile ahead: the keys' addresses must not wait for them. So are
            # the scales, which the pipeline for the matrix product leaves alone.
            page = following
            scale = scale_following
            position = i * BLOCK_N + n
            after = position + BLOCK_N
            following = _pages(row_of_table, after, longest, table_column, PAGE)
            inside = (page >= 0) & (page < pages)
            key = cache + page.to(tl.int64) * page_stride + (position % PAGE) * D
            if NATIVE:
                key = tl.multiple_of(key, ALIGN)[:, None] + d[None, :]
                key_codes = tl.load(key, mask=inside[:, None], other=0)
                products = tl.dot(key_codes.to(tl.float8e4nv, bitcast=True), query0)
            else:
                key = tl.multiple_of(key.to(tl.pointer_type(tl.int32)), ALIGN)
                key_words = tl.load(key[:, None] + word[None, :], mask=inside[:, None], other=0)
                products = tl.dot(decode_place(key_words, 0, ASSEMBLY), query0)
                products = tl.dot(decode_place(key_words, 1, ASSEMBLY), query1, products)
                products = tl.dot(decode_place(key_words, 2, ASSEMBLY), query2, products)
                products = tl.dot(decode_place(key_words, 3, ASSEMBLY), query3, products)
            scale_following = _scales(cache, following, after, pages, page_stride, PAGE, D)
            score = twice_weighted_sum(products, weight, ROWS, HEADS)
            score *= 0.5 if NATIVE else 0.5 * SCALE_OF_PRODUCTS
            score *= scale[:, None]
            seen = position[:, None] < end_of_row[None, :]
            tl.store(to[None, :] + position[:, None], score, mask=seen)

        # (Were lengths to change meanwhile, this must end all the same.)
        tile = tl.where(first < stop, tile + stop - first, end)
        if group * tiles + stop == tiles * GROUPS:
            at += units
            request += 1
