"""vLLM's sparse attention kernels, called as vLLM calls them, for those that can be imported.

Each peer takes q [T, N, 576], a cache and slots [T, k], and returns [T, N, 512]. FlashMLA wants at
least 64 heads on Hopper: its queries are padded before the clock starts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[int], Tensor]
"""The i-th of several calls that differ in their slots."""


def _padded(q: Tensor) -> Tensor:
    heads = q.shape[1]
    if heads >= 64:
        return q
    wide = q.new_zeros((q.shape[0], 64, q.shape[2]))
    wide[:, :heads] = q
    return wide


def flash_mla_sparse_fwd(q: Tensor, cache: Tensor, slots: list[Tensor], scale: float) -> Call:
    from vllm.third_party.flashmla import flash_mla_interface as flashmla

    wide, kv = _padded(q), cache.view(-1, 1, cache.shape[2])
    return lambda i: flashmla.flash_mla_sparse_fwd(wide, kv, slots[i].unsqueeze(1), scale)[0][
        :, : q.shape[1]
    ]


def flash_mla_with_kvcache(q: Tensor, cache: Tensor, slots: list[Tensor], scale: float) -> Call:
    from vllm.third_party.flashmla import flash_mla_interface as flashmla

    wide = _padded(q).unsqueeze(1)
    metadata, _ = flashmla.get_mla_metadata()
    arguments: dict[str, Any] = {
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "tile_scheduler_metadata": metadata, "softmax_scale": scale, "is_fp8_kvcache": True,
    }  # fmt: skip
    paged = cache.unsqueeze(-2)
    return lambda i: flashmla.flash_mla_with_kvcache(
        wide, paged, indices=slots[i].unsqueeze(1), **arguments
    )[0][:, 0, : q.shape[1]]


def flash_attention_3(q: Tensor, cache: Tensor, slots: list[Tensor], scale: float) -> Call:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    tokens, k = slots[0].shape
    flat = cache.view(-1, 1, 1, cache.shape[2])
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=q.device)
    counts = torch.full((tokens,), k, dtype=torch.int32, device=q.device)
    latent, rope = q[..., :512].contiguous(), q[..., 512:].contiguous()
    return lambda i: flash_attn_varlen_func(
        q=rope, k=flat[..., 512:], v=flat[..., :512], q_v=latent, max_seqlen_q=1,
        cu_seqlens_q=starts, max_seqlen_k=k, seqused_k=counts, block_table=slots[i],
        softmax_scale=scale, causal=True, fa_version=3,
    )  # fmt: skip


BF16 = {
    "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
    "FA3 sparse": flash_attention_3,
}
FP8 = {"flash_mla_with_kvcache": flash_mla_with_kvcache}
