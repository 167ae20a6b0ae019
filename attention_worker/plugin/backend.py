"""TRITON_MLA_SPARSE: vLLM's sparse attention over a latent KV cache, on this project's kernels."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, MLAAttentionImpl

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla.layout import FP8_TOKEN_BYTES, LATENT, ROPE
from attention_worker.plugin.layers import PAGE
from attention_worker.plugin.metadata import SparseMLAMetadata, SparseMLAMetadataBuilder
from attention_worker.vllm_compat import BACKEND, accept_fp8_for_backend

FP8 = "fp8_ds_mla"
_OLDEST_GPU = 8


# vLLM imports this module when it chooses the backend, and looks at the cache's dtype afterwards.
accept_fp8_for_backend()


class TritonMLASparseBackend(AttentionBackend):
    """What vLLM asks of a backend before it takes it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", FP8)
    ]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["TritonMLASparseImpl"]:
        return TritonMLASparseImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= _OLDEST_GPU)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, int, int]:
        return num_blocks, block_size, FP8_TOKEN_BYTES if cache_dtype_str == FP8 else head_size


class TritonMLASparseImpl(MLAAttentionImpl[SparseMLAMetadata]):
    """Attention of one layer."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = False
    supports_pcp = False
    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        topk_indices_buffer: Tensor | None = None,
        indexer: Any = None,
        **_: Any,
    ) -> None:
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap is not None:
            raise NotImplementedError(f"{BACKEND} has no ALiBi, sliding window or soft cap")
        if kv_lora_rank != LATENT or head_size != LATENT + ROPE:
            raise ValueError(
                f"kv_lora_rank: {kv_lora_rank} in heads of {head_size} is not served by {BACKEND} "
                f"(fix: a model with {LATENT} and {ROPE} more of rotary positions)"
            )
        if kv_cache_dtype not in TritonMLASparseBackend.supported_kv_cache_dtypes:
            served = ", ".join(TritonMLASparseBackend.supported_kv_cache_dtypes)
            raise ValueError(
                f"kv_cache_dtype: {kv_cache_dtype} is not served by {BACKEND} (fix: {served})"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.supports_quant_query_input = False
        # A layer without an indexer of its own attends to what one before it has selected.
        self.topk_indices_buffer = (
            indexer.topk_indices_buffer if indexer is not None else topk_indices_buffer
        )

    def record_logical_topk_ready(self) -> None:
        """Newer versions tell when this layer's indices are there; nothing waits for it."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *more: Any,
        **named: Any,
    ) -> None:
        """On a GPU as vLLM does it, to whose kernel the rest is given: versions differ in it."""
        if kv_cache.is_cuda:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *more, **named)
        elif kv_cache.numel():
            sparse_mla.insert(kv_c_normed, k_pe.flatten(1), slot_mapping.flatten(), kv_cache)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Args:
        q: latent [T, N, 512] and rope part [T, N, 64].
        kv_c_and_k_pe_cache: [blocks, 64, 576], or uint8 [blocks, 64, 656].
        """
        rows = len(q[0]) if isinstance(q, tuple) else len(q)
        assert self.topk_indices_buffer is not None
        blocks, page, _ = kv_c_and_k_pe_cache.shape
        slots = sparse_mla.to_slots(
            self.topk_indices_buffer[:rows],
            attn_metadata.request_of_row[:rows],
            attn_metadata.block_table,
            page,
            pages=blocks,
        )
        return sparse_mla.attend(q, kv_c_and_k_pe_cache, slots, self.scale), None
