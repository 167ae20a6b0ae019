"""What `k_cache.insert` and `k_cache.gather` mean, in plain torch."""

import torch
from torch import Tensor

from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.k_cache.layout import SCALE_BYTES, planes, read_pages

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4


def insert(k: Tensor, slots: Tensor, k_cache: Tensor, replica: Tensor | None) -> None:
    """See `k_cache.insert`; arguments are already checked."""
    pages, page, _ = k_cache.shape
    k = k[: len(slots)]
    inside = (slots >= 0) & (slots < pages * page)
    slots = slots[inside]
    quantised, scales = quantise(k[inside])
    for cache in (k_cache,) if replica is None else (k_cache, replica):
        values, scale_bytes = planes(cache)
        place = (slots // page).to(cache.device), (slots % page).to(cache.device)
        values[place] = quantised.view(torch.uint8).to(cache.device)
        scale_bytes[place] = scales.unsqueeze(1).view(torch.uint8).to(cache.device)


def quantise(k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [T, D] -> (float8_e4m3fn [T, D], power-of-two scales fp32 [T])."""
    exact = k.to(torch.float32)
    finite = torch.where(exact.isfinite(), exact.abs(), 0.0)
    scales = _power_of_two_above(finite.amax(1).clamp_min(SMALLEST_AMAX))
    scaled = (exact / scales.unsqueeze(1)).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = torch.where(exact.isnan(), torch.nan, scaled)  # one NaN, whatever its sign was
    return scaled.to(E4M3), scales


def _power_of_two_above(amax: Tensor) -> Tensor:
    """2^ceil(log2(amax / 448)), exactly: log2 in floating point would round at the powers."""
    mantissa, exponent = torch.frexp(amax.to(torch.float64) / E4M3_MAX)  # mantissa in [0.5, 1)
    ceil_log2 = exponent - (mantissa == 0.5).to(torch.int32)
    return ((ceil_log2 + 127) << 23).to(torch.int32).view(torch.float32)  # always a normal fp32


def gather(
    k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, total: int, enabled: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `k_cache.gather`; arguments are already checked."""
    page, width = k_cache.shape[1:]
    values = torch.zeros((total, width - SCALE_BYTES), dtype=torch.uint8, device=k_cache.device)
    scales = torch.zeros(total, dtype=torch.float32, device=k_cache.device)
    if enabled is None or int(enabled):
        at = 0
        for length, row in zip(seq_lens.tolist(), block_table, strict=True):
            count = max(min(length, total - at), 0)
            part = slice(at, at + count)
            some, some_scales = read_pages(k_cache, row[: -(-count // page)])
            values[part], scales[part] = some[:count], some_scales[:count]
            at += count
    return values.view(E4M3), scales
