"""`k_cache.gather` in Triton: a balanced copy, whatever the requests' lengths."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.k_cache.layout import SCALE_BYTES, alignment

_KEYS = 64
"""Keys of one program."""
_WARPS = 2
_REQUESTS = 128
"""Lengths that a program reads at a time while it looks for its first request."""


@triton.jit
def _find(seq_lens, requests, length_stride, key, CHUNK: tl.constexpr):
    """The request that holds key number `key` of all, and the number of its first key."""
    begin = tl.zeros((), tl.int64)
    request = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.int64)
    for first in range(0, requests, CHUNK):
        number = first + tl.arange(0, CHUNK)
        there = number < requests
        length = tl.load(seq_lens + number * length_stride, mask=there, other=0)
        ends = total + tl.cumsum(tl.maximum(length, 0).to(tl.int64), 0)
        passed = ends <= key
        request += tl.sum((passed & there).to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends, 0), 0))
        total = tl.max(ends, 0)
    return request, begin


@triton.jit(
    do_not_specialize=(
        "requests", "columns", "pages", "total", "page_stride", "table_row", "table_column",
        "length_stride",
    ),
    do_not_specialize_on_alignment=("k_cache", "block_table", "seq_lens", "enabled"),
)  # fmt: skip
def gather_kernel(
    k_cache, block_table, seq_lens, enabled, values, scales, requests, columns, pages,
    total: tl.int64, page_stride: tl.int64, table_row: tl.int64, table_column: tl.int64,
    length_stride: tl.int64, DIM: tl.constexpr, PAGE: tl.constexpr,
    ALIGNED: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """KEYS keys of the result: values uint8 [total, DIM] and scales uint8 [total, 4].

    A program goes through its keys a request at a time. The lengths may be more or less than
    `total` in all: nothing is written past `total`, nor read past the table. enabled: int32 [1]
    or None; 0: do nothing.
    """
    if enabled is not None:  # noqa: SIM102 - decided when compiling
        if tl.load(enabled) == 0:
            return
    key = tl.program_id(0).to(tl.int64) * KEYS
    request, begin = _find(seq_lens, requests, length_stride, key, CHUNK)
    end = tl.minimum(key + KEYS, total)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK_D)
    byte = tl.arange(0, 4)
    while (key < end) & (request < requests):
        length = tl.maximum(tl.load(seq_lens + request * length_stride), 0)
        count = tl.minimum(begin + length, end) - key
        there = n < count
        position = key - begin + n
        column = position // PAGE
        place = position % PAGE
        entry = block_table + request * table_row + column * table_column
        page = tl.load(entry, mask=there & (column < columns), other=-1)
        inside = (page >= 0) & (page < pages)
        row = k_cache + page.to(tl.int64) * page_stride
        at = row + place * DIM
        scale_at = row + (PAGE * DIM + place * 4)
        if ALIGNED > 1:
            at = tl.multiple_of(at, ALIGNED)
            scale_at = tl.multiple_of(scale_at, 4)
        within = (d < DIM)[None, :]
        codes = tl.load(at[:, None] + d[None, :], mask=inside[:, None] & within, other=0)
        scale = tl.load(scale_at[:, None] + byte[None, :], mask=inside[:, None], other=0)
        nan = tl.where(byte == 3, 0x7F, tl.where(byte == 2, 0xC0, 0)).to(tl.uint8)
        scale = tl.where(inside[:, None], scale, nan[None, :])
        to = (key + n) * DIM
        tl.store(values + to[:, None] + d[None, :], codes, mask=there[:, None] & within)
        tl.store(scales + ((key + n) * 4)[:, None] + byte[None, :], scale, mask=there[:, None])
        key += count
        begin += length
        request += 1


def gather(
    k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, total: int, enabled: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `k_cache.gather`; arguments are already checked."""
    pages, page, width = k_cache.shape
    dim = width - SCALE_BYTES
    values = torch.empty((total, dim), dtype=torch.uint8, device=k_cache.device)
    scales = torch.empty(total, dtype=torch.float32, device=k_cache.device)
    if total:
        gather_kernel[(-(-total // _KEYS),)](
            k_cache, block_table, seq_lens, enabled, values, scales.view(torch.uint8),
            len(seq_lens), block_table.shape[1], pages, total, k_cache.stride(0),
            *block_table.stride(), seq_lens.stride(0),
            DIM=dim, PAGE=page, ALIGNED=alignment(k_cache), KEYS=_KEYS,
            BLOCK_D=1 << (dim - 1).bit_length(), CHUNK=_REQUESTS, num_warps=_WARPS,
        )  # fmt: skip
    return values.view(E4M3), scales
