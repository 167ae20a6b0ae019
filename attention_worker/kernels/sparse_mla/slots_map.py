"""`sparse_mla.to_slots` in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(
    do_not_specialize=(
        "k", "requests", "columns", "page", "pages", "indices_token", "indices_place",
        "request_stride", "table_row", "table_column",
    ),
    do_not_specialize_on_alignment=("indices", "request_of_token", "block_table", "slots", "count"),
)  # fmt: skip
def to_slots_kernel(
    indices, request_of_token, block_table, slots, count, k, requests, columns: tl.int64,
    page: tl.int64, pages: tl.int64, indices_token: tl.int64, indices_place: tl.int64,
    request_stride: tl.int64, table_row: tl.int64, table_column: tl.int64,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK indices of one token; `pages` is past the last usable page."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < k
    at = indices + token * indices_token + place * indices_place
    position = tl.load(at, mask=there, other=-1).to(tl.int64)
    request = tl.load(request_of_token + token * request_stride)
    known = (request >= 0) & (request < requests)
    inside = known & (position >= 0) & (position < columns * page)
    entry = block_table + request.to(tl.int64) * table_row + (position // page) * table_column
    number = tl.load(entry, mask=inside, other=-1).to(tl.int64)
    slot = number * page + position % page
    usable = inside & (number >= 0) & (number < pages) & (slot <= 0x7FFFFFFF)
    tl.store(slots + token * k + place, tl.where(usable, slot, -1).to(tl.int32), mask=there)
    if COUNT:
        lost = tl.sum((there & ~usable & (position != -1)).to(tl.int32), 0)
        if lost > 0:
            tl.atomic_add(count, lost, sem="relaxed")


def to_slots(
    indices: Tensor,
    request_of_token: Tensor,
    block_table: Tensor,
    page: int,
    pages: int | None,
    invalid_count: Tensor | None,
) -> Tensor:
    """See `sparse_mla.to_slots`; arguments are already checked."""
    tokens, k = indices.shape
    requests, columns = block_table.shape
    slots = torch.empty((tokens, k), dtype=torch.int32, device=indices.device)
    if slots.numel():
        to_slots_kernel[(tokens, triton.cdiv(k, _BLOCK))](
            indices, request_of_token, block_table, slots,
            slots if invalid_count is None else invalid_count,
            k, requests, columns, page, 2**31 if pages is None else pages,
            *indices.stride(), request_of_token.stride(0), *block_table.stride(),
            COUNT=invalid_count is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return slots
