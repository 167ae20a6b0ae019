"""`mqa_logits` with the operations that vLLM's XPU build registers in its process.

They exist only where vLLM was loaded; nothing of it is imported here. They drop a NaN in a dot
product or a scale, where `mqa_logits` promises NaN: such a key scores 0.
"""

from typing import Any

import torch
from torch import Tensor

from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.mqa_logits.foreign import in_range

_DIM, _PAGE, _HEADS = 128, 64, 32
"""Keys and pages of this size; heads come in blocks of so many."""


def _operation(name: str) -> Any:
    """torch.ops.vllm.<name>, None where no vLLM for XPU registered it."""
    return getattr(torch.ops.vllm, name, None)


def _unsupported(name: str, q: Tensor) -> str | None:
    """Why not, for an operation's name and a query."""
    if _operation(name) is None:
        return f"torch.ops.vllm.{name} is not registered"
    heads, dim = q.shape[-2:]
    if heads % _HEADS or dim != _DIM:
        return f"{heads} heads of {dim} values are not blocks of {_HEADS} of {_DIM}"
    return None


def paged_unsupported(q: Tensor, k_cache: Tensor) -> str | None:
    """Why `paged` cannot take these arguments, or None."""
    if k_cache.shape[1] != _PAGE:
        return f"pages of {k_cache.shape[1]} tokens are not {_PAGE}"
    return _unsupported("xpu_fp8_paged_mqa_logits", q)


def paged(
    q: Tensor, k_cache: Tensor, weights: Tensor, seq_lens: Tensor, block_table: Tensor, out: Tensor
) -> None:
    """See `mqa_logits.paged`; arguments are checked, q is uint8, out's columns are the context.

    The operation takes one length a request; rows have lengths of their own here, so each row is
    a request of one row.
    """
    batch, next_n, heads, dim = q.shape
    if not batch or not out.shape[1] or not block_table.shape[1] or not len(k_cache):
        out.fill_(-torch.inf)
        return
    safe = in_range(k_cache, seq_lens, block_table, next_n, out.shape[1])
    scores = _operation("xpu_fp8_paged_mqa_logits")(
        q.reshape(batch * next_n, 1, heads, dim).view(E4M3),
        k_cache.unsqueeze(2),
        weights.contiguous(),
        safe.lengths.reshape(-1).contiguous(),
        safe.block_table.repeat_interleave(next_n, 0),
        None,
        out.shape[1],
    )
    safe.finish(scores, out)


def ragged_unsupported(q: Tensor) -> str | None:
    """Why `ragged` cannot take these arguments, or None."""
    return _unsupported("xpu_fp8_mqa_logits", q)


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
    scores = _operation("xpu_fp8_mqa_logits")(
        q.contiguous().view(E4M3),
        k.contiguous().view(E4M3),
        k_scale.contiguous(),
        weights.contiguous(),
        row_start.clamp(0, len(k)).contiguous(),
        row_end.clamp(0, len(k)).contiguous(),
    )
    out.copy_(scores)
