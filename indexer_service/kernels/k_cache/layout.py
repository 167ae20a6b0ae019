"""The indexer's K cache: uint8 [pages, page, D+4], planar inside a page.

A page is `page` x D bytes of e4m3 values and then `page` fp32 scales, so the [page, D+4] shape
of the tensor says only how long a page is: token t's value d is byte t*D + d of its page and its
scale bytes page*D + 4*t to +3. Pages may lie anywhere: offsets use stride(0), which is larger
than the page when one buffer holds all layers. (Source: vLLM `indexer_k_quant_and_cache`.)
"""

import torch
from torch import Tensor

from indexer_service.kernels.checks import expect, fault

SCALE_BYTES = 4
_VECTOR_BYTES = 16


def check_k_cache(
    k_cache: Tensor, device: torch.device | None = None, name: str = "k_cache"
) -> int:
    """Checks shape, dtype and strides; returns D, the values of one token."""
    expect(name, k_cache, "[pages, page, D+4]", (None, None, None), torch.uint8, device)
    _, page, width = k_cache.shape
    if width <= SCALE_BYTES or page < 1:
        raise fault(name, f"shape {list(k_cache.shape)} has no values", "[pages, page, D+4]")
    if k_cache.stride(2) != 1 or (page > 1 and k_cache.stride(1) != width):
        wanted = f"(any, {width}, 1)"
        raise fault(
            name, f"strides {k_cache.stride()} are not {wanted}", "keep each page contiguous"
        )
    return width - SCALE_BYTES


def alignment(k_cache: Tensor) -> int:
    """Bytes that every page and every token's values are aligned to: 16, or else 1.

    With 16 the scales are aligned to their own 4 bytes.
    """
    starts = (k_cache.data_ptr(), k_cache.stride(0), k_cache.shape[2] - SCALE_BYTES)
    return 1 if any(start % _VECTOR_BYTES for start in starts) else _VECTOR_BYTES


def planes(k_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a K cache: values uint8 [pages, page, D] and scale bytes uint8 [pages, page, 4]."""
    pages, page, width = k_cache.shape
    flat = k_cache.view(pages, page * width)
    split = page * (width - SCALE_BYTES)
    values = flat[:, :split].unflatten(1, (page, width - SCALE_BYTES))
    return values, flat[:, split:].unflatten(1, (page, SCALE_BYTES))


def read_pages(k_cache: Tensor, page_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Copies pages: values uint8 [n*page, D] (e4m3 bytes) and scales fp32 [n*page].

    A page id outside the cache reads nothing: its scales are NaN, so that its keys score NaN and
    are never selected.
    """
    pages, page, width = k_cache.shape
    page_ids = page_ids.to(torch.int64)  # a copy: a shared table may change while it is read
    inside = (page_ids >= 0) & (page_ids < pages)
    values, scale_bytes = planes(k_cache)
    if pages == 0:
        empty = values.new_zeros(len(page_ids) * page, width - SCALE_BYTES)
        return empty, torch.full((len(empty),), torch.nan, device=k_cache.device)
    safe = torch.where(inside, page_ids, 0)
    scales = scale_bytes[safe].view(torch.float32).squeeze(2)
    scales.masked_fill_(~inside.unsqueeze(1), torch.nan)
    return values[safe].flatten(0, 1), scales.flatten()
