"""Scores of a tile of keys for a block of rows, on any GPU from SM80 up.

The tile of keys stays in the program, and the rows' queries stream by, a few rows at a time.
Queries are read again for every tile of keys, by way of the L2 cache: the wider the tile, the less
of that.
"""

import triton
import triton.language as tl

from indexer_service.kernels.e4m3 import SCALE_OF_PRODUCTS
from indexer_service.kernels.mqa_logits.ragged_heads import sum_heads

UNSPECIALISED = ("rows", "keys", "block_rows", "out_row")
"""Numbers whose values must not make new kernels."""

UNALIGNED = ("k_scale", "row_start", "row_end", "out", "enabled")
"""Pointers that may lie anywhere."""


@triton.jit
def seeing_rows(
    row_start, row_end, first_row, end_row, first_key, end_key, MOST_ROWS: tl.constexpr
):
    """The range [low, high) of a block's rows that see a key in [first_key, end_key).

    Rows between may see none. Without any, low is end_row and high first_row.
    """
    row = first_row + tl.arange(0, MOST_ROWS)
    inside = row < end_row
    start = tl.load(row_start + row, mask=inside, other=0)
    end = tl.load(row_end + row, mask=inside, other=0)
    sees = (tl.maximum(start, first_key) < tl.minimum(end, end_key)) & inside
    low = tl.min(tl.where(sees, row, end_row), 0)
    high = tl.max(tl.where(sees, row + 1, first_row), 0)
    return low, high


@triton.jit
def _fill(out, first_row, end_row, out_row, key, inside):
    """-inf for rows that see no key of the tile."""
    for row in range(first_row, end_row):
        nothing = tl.full(key.shape, float("-inf"), tl.float32)
        tl.store(out + tl.cast(row, tl.int64) * out_row + key, nothing, mask=inside)


@triton.jit(do_not_specialize=("begin", *UNSPECIALISED), do_not_specialize_on_alignment=UNALIGNED)
def ragged_kernel(
    q, k, k_scale, weights, row_start, row_end, out, enabled, begin, rows, keys, block_rows,
    out_row: tl.int64, HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, MOST_ROWS: tl.constexpr, DECODED: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """KEYS keys from `begin` on for block_rows rows, ROWS of them at a time.

    q: [M, HEADS, DIM], k: [keys - begin, DIM], weights: fp32 [M, HEADS], contiguous and aligned to
    16 bytes; q and k are e4m3, or with DECODED fp16 as `decode_e4m3` makes it. k_scale: fp32
    [keys]; out: fp32 [M, keys]; without FILL only what a row sees is written. enabled: int32 [1]
    or None; with 0 in it nothing is.
    """
    if enabled is not None and tl.load(enabled) == 0:
        return
    tiles = tl.cdiv(keys - begin, KEYS)
    program = tl.program_id(0)
    first_key = begin + (program % tiles) * KEYS
    first_row = (program // tiles) * block_rows
    end_row = tl.minimum(first_row + block_rows, rows)
    end_key = tl.minimum(first_key + KEYS, keys)
    key = first_key + tl.arange(0, KEYS)
    inside = key < keys
    low, high = seeing_rows(row_start, row_end, first_row, end_row, first_key, end_key, MOST_ROWS)
    if FILL:
        _fill(out, first_row, low, out_row, key, inside)
        _fill(out, tl.maximum(low, high), end_row, out_row, key, inside)
    if low >= high:
        return

    d = tl.arange(0, DIM)
    tile = k + (key - begin).to(tl.int64)[:, None] * DIM + d[None, :]
    tile = tl.load(tile, mask=inside[:, None], other=0.0)
    scale = tl.load(k_scale + key, mask=inside, other=0.0)
    column = tl.arange(0, ROWS * HEADS)
    g = tl.arange(0, ROWS)
    for row in tl.range(low, high, ROWS, num_stages=STAGES):
        there = row + column // HEADS < high
        wide_row = tl.cast(row, tl.int64)
        query = q + wide_row * (HEADS * DIM) + column[:, None] * DIM + d[None, :]
        query = tl.load(query, mask=there[:, None], other=0.0)
        weight = tl.load(weights + wide_row * HEADS + column, mask=there, other=0.0)
        of_group = row + g < high
        start = tl.load(row_start + row + g, mask=of_group, other=0)
        end = tl.load(row_end + row + g, mask=of_group, other=0)
        score = sum_heads(tl.dot(tile, tl.trans(query)), weight, ROWS, HEADS)
        if DECODED:
            score = score * SCALE_OF_PRODUCTS
        score = score * scale[:, None]
        seen = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
        to = out + (wide_row + g)[None, :] * out_row + key[:, None]
        if FILL:
            score = tl.where(seen, score, float("-inf"))
            tl.store(to, score, mask=inside[:, None] & of_group[None, :])
        else:
            tl.store(to, score, mask=seen & inside[:, None] & of_group[None, :])
