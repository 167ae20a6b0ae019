"""Slow references that share no code with the project: numpy, Python loops, float64."""

import math

import numpy as np
import torch
from torch import Tensor


def e4m3(codes: Tensor) -> np.ndarray:
    """e4m3 bytes -> float64 by the format's definition: bias 7, no infinity, NaN = S.1111.111."""
    bits = codes.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    magnitude = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    magnitude = np.where((exponent == 15) & (mantissa == 7), np.nan, magnitude)
    return np.where(bits >> 7 == 1, -magnitude, magnitude)


def planar_page(page_bytes: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of one page -> (e4m3 codes [page, dim], fp32 scales [page])."""
    page = len(page_bytes) // (dim + 4)
    codes = page_bytes[: page * dim].reshape(page, dim)
    return codes, page_bytes[page * dim :].copy().view(np.float32)


def request_keys(k_cache: Tensor, table: list[int], length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys of a request: codes uint8 [length, D] and scales fp32 [length]."""
    page, width = k_cache.shape[1:]
    codes, scales = [], []
    for position in range(length):
        page_bytes = k_cache[table[position // page]].numpy().reshape(-1)
        page_codes, page_scales = planar_page(page_bytes, width - 4)
        codes.append(page_codes[position % page])
        scales.append(page_scales[position % page])
    if not length:
        return torch.empty((0, width - 4), dtype=torch.uint8), torch.empty(0)
    return torch.from_numpy(np.stack(codes)), torch.from_numpy(np.array(scales))


def scores(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor) -> np.ndarray:
    """float64 [R, N] of q [R, H, D], k [N, D]: every key for every row."""
    dots = np.einsum("rhd,nd->rhn", e4m3(q), e4m3(k))
    weighted = np.maximum(dots, 0.0) * weights.numpy().astype(np.float64)[:, :, None]
    return weighted.sum(axis=1) * k_scale.numpy().astype(np.float64)


def top_k(row: list[float], k: int, start: int = 0, end: int | None = None) -> list[int]:
    """The contract of topk.select, by sorting: relative to start, ascending, -1 at the tail."""
    end = len(row) if end is None else end
    candidates = [
        column
        for column in range(max(start, 0), min(end, len(row)))
        if not math.isnan(row[column]) and row[column] != -math.inf
    ]
    best = sorted(candidates, key=lambda column: (-row[column], column))[:k]
    return [column - start for column in sorted(best)] + [-1] * (k - len(best))


def attention(
    q: Tensor, tokens: Tensor, slots: list[int], scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One token's attention, float64: q [N, W], tokens [all, W] -> out [N, 512], lse [N]."""
    valid = [slot for slot in slots if 0 <= slot < len(tokens)]
    heads = q.shape[0]
    if not valid:
        return np.zeros((heads, 512)), np.full(heads, -np.inf)
    kv = tokens[valid].double().numpy()
    logits = q.double().numpy() @ kv.T * scale
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return (weights / total) @ kv[:, :512], (top + np.log(total))[:, 0]
