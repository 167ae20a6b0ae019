"""Scores of the lightning indexer (FP8 multi-query attention logits).

    score[row, s] = k_scale[s] * sum_h weights[row, h] * relu(q[row, h] . k[s])

`reference.py` computes them in float64 and rounds once; other implementations round more often.
Whatever else is in the batch, an implementation gives a row the same bits.
"""

import torch
from torch import Tensor

from indexer_service.kernels.checks import e4m3_bytes, expect, expect_rows, fault
from indexer_service.kernels.dispatch import Implementation, Operation
from indexer_service.kernels.k_cache.layout import check_k_cache

__all__ = ["paged", "paged_implementation", "ragged", "ragged_function", "ragged_implementation"]

_HERE = "indexer_service.kernels.mqa_logits"
_paged = Operation(
    "mqa_logits.paged",
    reference=f"{_HERE}.reference:paged",
    triton=f"{_HERE}.paged_launch:paged",
    deepgemm=f"{_HERE}.deep_gemm:paged",
    xpu=f"{_HERE}.xpu:paged",
)
_ragged = Operation(
    "mqa_logits.ragged",
    reference=f"{_HERE}.reference:ragged",
    triton=f"{_HERE}.ragged_launch:ragged",
    deepgemm=f"{_HERE}.deep_gemm:ragged",
    xpu=f"{_HERE}.xpu:ragged",
)


def paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_context: int,
    *,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Scores of the keys in a paged cache, for decode rows.

    Args:
        q: e4m3 [B, next_n, H, D] (float8_e4m3fn, or its bytes as uint8).
        k_cache: uint8 [pages, page, D+4], planar pages at any stride(0).
        weights: fp32 [B*next_n, H], all scales of q folded in.
        seq_lens: int32, contiguous or not: [B, next_n], the keys each row sees, or [B], the
            length L after the last of the next_n tokens (token j sees L - next_n + 1 + j).
        block_table: int32 [B, n], page numbers. Keys past the table score -inf, keys of a page
            outside the cache NaN: neither is ever selected.
        max_context: columns of the result; lengths above it are cut.
        out: fp32 [B*next_n, max_context] with contiguous rows, written whole.
        impl: "auto" or an implementation's name; `dispatch.PREFERENCE` lists them.

    Returns:
        fp32 [B*next_n, max_context], -inf past each row's length. A NaN in q or weights makes
        its row NaN, a NaN in a key or its scale that key's column.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or `impl` does not support it.
    """
    check_paged(q, k_cache, weights, seq_lens, block_table)
    if max_context < 0:
        raise fault("max_context", f"{max_context} is negative", "give 0 or more")
    shape = (len(weights), max_context)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=q.device)
    expect_rows("out", out, "[B*next_n, max_context]", shape, torch.float32, q.device)
    score = _paged.implementation(impl, q.device, q, k_cache)
    score(q.view(torch.uint8), k_cache, weights, seq_lens, block_table, out)
    return out


def ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    *,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Scores of gathered keys, for prefill rows.

    Args:
        q: e4m3 [M, H, D] (float8_e4m3fn, or its bytes as uint8).
        k: e4m3 [N, D], gathered keys of all requests.
        k_scale: fp32 [N].
        weights: fp32 [M, H], all scales of q folded in.
        row_start, row_end: int32 [M]; row r sees the keys row_start[r] <= s < row_end[r].
            Bounds outside [0, N] are cut to it.
        out: fp32 [M, N] with contiguous rows, written whole.
        impl: "auto" or an implementation's name; `dispatch.PREFERENCE` lists them.

    Returns:
        fp32 [M, N], -inf outside each row's bounds; NaN as for `paged`.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or `impl` does not support it.
    """
    check_ragged(q, k, k_scale, weights, row_start, row_end)
    shape = (len(q), len(k))
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=q.device)
    expect_rows("out", out, "[M, N]", shape, torch.float32, q.device)
    score = _ragged.implementation(impl, q.device, q)
    score(q.view(torch.uint8), k.view(torch.uint8), k_scale, weights, row_start, row_end, out)
    return out


def paged_implementation(impl: str, q: Tensor, k_cache: Tensor) -> str:
    """The name of what `paged` runs for this `impl` and checked arguments."""
    return _paged.chosen(impl, q.device, q, k_cache)


def ragged_implementation(impl: str, q: Tensor) -> str:
    """The name of what `ragged` runs for this `impl` and checked arguments."""
    return _ragged.chosen(impl, q.device, q)


def ragged_function(impl: str, q: Tensor) -> Implementation:
    """What `ragged` runs: for checked arguments, q and k as uint8, and an `out`."""
    return _ragged.implementation(impl, q.device, q)


def check_paged(
    q: Tensor, k_cache: Tensor, weights: Tensor, seq_lens: Tensor, block_table: Tensor
) -> None:
    """Raises the ValueError of `paged` for its tensors."""
    dim = check_k_cache(k_cache)
    e4m3_bytes("q", q, "[B, next_n, H, D]", (None, None, None, dim))
    batch, next_n, heads, _ = q.shape
    device = expect("k_cache", k_cache, "", k_cache.shape, torch.uint8, q.device).device
    if next_n < 1 or heads < 1:
        raise fault("q", f"shape {list(q.shape)} has no rows or heads", "give [B, next_n, H, D]")
    expect("weights", weights, "[B*next_n, H]", (batch * next_n, heads), torch.float32, device)
    if seq_lens.dim() == 1:
        expect("seq_lens", seq_lens, "[B]", (batch,), torch.int32, device)
    else:
        expect("seq_lens", seq_lens, "[B, next_n] or [B]", (batch, next_n), torch.int32, device)
    expect("block_table", block_table, "[B, n]", (batch, None), torch.int32, device)


def check_ragged(
    q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, row_start: Tensor, row_end: Tensor
) -> None:
    """Raises the ValueError of `ragged` for its tensors."""
    e4m3_bytes("q", q, "[M, H, D]", (None, None, None))
    rows, heads, dim = q.shape
    if heads < 1:
        raise fault("q", f"shape {list(q.shape)} has no heads", "give [M, H, D]")
    e4m3_bytes("k", k, "[N, D]", (None, dim))
    expect("k", k, "[N, D]", k.shape, k.dtype, q.device)
    expect("k_scale", k_scale, "[N]", (len(k),), torch.float32, q.device)
    expect("weights", weights, "[M, H]", (rows, heads), torch.float32, q.device)
    expect("row_start", row_start, "[M]", (rows,), torch.int32, q.device)
    expect("row_end", row_end, "[M]", (rows,), torch.int32, q.device)
