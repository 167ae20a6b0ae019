"""`mqa_logits` with DeepGEMM's kernels, where the package `deep_gemm` is installed (SM90, SM100).

Its scores are not the bits of the other implementations, and it drops a NaN in a dot product: a
NaN code in a query or key counts as a head that scores 0 there, where `mqa_logits` promises NaN.
(NaN in weights and scales stays.) It compiles its own kernels, once for each number of heads.
"""

import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from indexer_service.kernels.architecture import FORCE_ARCH
from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.mqa_logits.foreign import in_range

_MAJORS = (9, 10)
_HEADS = (32, 64)
_DIM, _PAGE = 128, 64
_LONGEST_STEP = 2
"""next_n: more is flattened by callers of DeepGEMM on SM90."""
_ALIGNMENT = 16
"""Bytes: what its bulk copies need."""


@cache
def _package() -> ModuleType | None:
    """None where it is missing, or finds no CUDA toolkit to compile with."""
    try:
        return import_module("deep_gemm")
    except (ImportError, AssertionError, RuntimeError, OSError):
        return None


def _unsupported(q: Tensor) -> str | None:
    """Why not on q's device or for its heads."""
    if os.environ.get(FORCE_ARCH):
        return f"{FORCE_ARCH} is set"
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] not in _MAJORS:
        return "it needs SM90 or SM100"
    if _package() is None:
        return "the package deep_gemm cannot be imported"
    heads, dim = q.shape[-2:]
    if heads not in _HEADS or dim != _DIM:
        return f"{heads} heads of {dim} values are not 32 or 64 of {_DIM}"
    return None


def paged_unsupported(q: Tensor, k_cache: Tensor) -> str | None:
    """Why `paged` cannot take these arguments, or None."""
    if q.shape[1] > _LONGEST_STEP:
        return f"next_n {q.shape[1]} is more than {_LONGEST_STEP}"
    if k_cache.shape[1] != _PAGE:
        return f"pages of {k_cache.shape[1]} tokens are not {_PAGE}"
    if k_cache.stride(0) % _ALIGNMENT or k_cache.data_ptr() % _ALIGNMENT:
        return f"the pages do not lie at multiples of {_ALIGNMENT} bytes"
    return _unsupported(q)


def paged(
    q: Tensor, k_cache: Tensor, weights: Tensor, seq_lens: Tensor, block_table: Tensor, out: Tensor
) -> None:
    """See `mqa_logits.paged`; arguments are checked, q is uint8, out's columns are the context."""
    batch, next_n = q.shape[:2]
    if not batch or not out.shape[1] or not block_table.shape[1] or not len(k_cache):
        out.fill_(-torch.inf)
        return
    safe = in_range(k_cache, seq_lens, block_table, next_n, out.shape[1])
    # Its schedule goes by the last row's length, and fails where all lengths are 0.
    longest = safe.lengths.amax(1, keepdim=True).clamp_min(1).expand(-1, next_n).contiguous()
    package = _package()
    assert package is not None
    schedule = package.get_paged_mqa_logits_metadata(longest, _PAGE, package.get_num_sms())
    scores = package.fp8_paged_mqa_logits(
        q.contiguous().view(E4M3), k_cache.unsqueeze(2), weights.contiguous(), longest,
        safe.block_table, schedule, out.shape[1], False,
    )  # fmt: skip
    safe.finish(scores, out)


def ragged_unsupported(q: Tensor) -> str | None:
    """Why `ragged` cannot take these arguments, or None."""
    return _unsupported(q)


def ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor,
) -> None:
    """See `mqa_logits.ragged`; arguments are checked, q and k are uint8."""
    if not len(q) or not len(k):
        out.fill_(-torch.inf)
        return
    package = _package()
    assert package is not None
    start, end = row_start.clamp(0, len(k)), row_end.clamp(0, len(k))
    keys = (k.contiguous().view(E4M3), k_scale.contiguous())
    scores = package.fp8_mqa_logits(
        q.contiguous().view(E4M3), keys, weights.contiguous(), start, torch.maximum(start, end),
        False,
    )  # fmt: skip
    column = torch.arange(len(k), dtype=torch.int32, device=q.device)
    hidden = (column < start.unsqueeze(1)) | (column >= end.unsqueeze(1))
    out.copy_(scores).masked_fill_(hidden, -torch.inf)
