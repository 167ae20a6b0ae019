"""vLLM's indexer operator, replaced: keys go into the K cache, indices come from a step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from attention_worker.plugin.cpu_platform import quantise_queries
from attention_worker.plugin.indexer_metadata import (
    IndexerMetadata,
    IndexerMetadataBuilder,
    engine_of,
    geometry_of,
)
from attention_worker.plugin.layers import PAGE, layer_number
from attention_worker.plugin.limits import check_engine
from attention_worker.vllm_compat import (
    adapt_query_kernels,
    is_v32_indexer,
    layer_name_codec,
    layer_name_type,
    register_op,
    replace_indexer,
)

_encode, _resolve = layer_name_codec()


@dataclass(frozen=True)
class _Layer:
    number: int
    top_k: int
    reserved_bytes: int


_layers: dict[str, _Layer] = {}
"""By the name of their K cache; an operator is given nothing but names and tensors."""


def select_indices(
    q: Tensor, k: Tensor, weights: Tensor, topk_indices: Tensor, layer_name: str
) -> None:
    """Args:
    q: e4m3 [T, H, D]; k: bf16 [T, D], not quantised; weights: fp32 [T, H], scales folded in.
    topk_indices: int32 [most tokens, k or more]; rows of the batch are written.
    layer_name: of the layer's K cache, as vLLM passes names to operators.
    """
    name = _resolve(layer_name)
    layer = _layers[name]
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        # A dummy run. vLLM looks at how much memory is left after the first one.
        torch.empty(layer.reserved_bytes, dtype=torch.uint8, device=q.device)
        return
    own = metadata[name]
    if not isinstance(own, IndexerMetadata):
        raise TypeError(f"{name}: metadata of type {type(own).__name__} (fix: one indexer plugin)")
    own.steps.insert(layer.number, k, own.slot_mapping[: len(k)])
    own.steps.select(layer.number, q, weights, topk_indices[: len(q), : layer.top_k])


def _select_indices_fake(
    q: Tensor, k: Tensor, weights: Tensor, topk_indices: Tensor, layer_name: str
) -> None:
    return None


# vLLM derives the operator's schema from the annotations, and names have a type of its own.
for _function in (select_indices, _select_indices_fake):
    _function.__annotations__["layer_name"] = layer_name_type()

_operator = register_op(
    "dsa_indexer_select_indices", select_indices, _select_indices_fake, ["topk_indices"]
)


class ServiceIndexer(SparseAttnIndexer):
    """Takes the place of DeepSeek-V3.2's indexer operator; that of later models stays vLLM's."""

    def __init__(self, k_cache: Any, *arguments: Any, **named: Any) -> None:
        self._is_ours = is_v32_indexer(k_cache)
        if not self._is_ours:
            super().__init__(k_cache, *arguments, **named)
            return
        # vLLM's own constructor asks for kernels that are not used.
        CustomOp.__init__(self)
        self._construct(k_cache, *arguments, **named)

    def _construct(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str | None,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        skip_k_cache_insert: bool = False,
        **_: Any,
    ) -> None:
        if skip_k_cache_insert or quant_block_size != head_dim or scale_fmt != "ue8m0":
            raise ValueError(
                f"indexer: keys in groups of {quant_block_size} with scales {scale_fmt} are not "
                f"served by dsa-indexer (fix: one power-of-two scale for all {head_dim})"
            )
        config = get_current_vllm_config()
        check_engine(config)
        adapt_query_kernels(quantise_queries)
        self.k_cache = k_cache
        self.topk_tokens = topk_tokens
        self.topk_indices_buffer = topk_indices_buffer
        # vLLM's attention layer writes here which of its own batches need no indices.
        self.dense_mha_metadata_layer_name = ""
        number = layer_number(k_cache.prefix)
        reserved = 0
        if topk_indices_buffer.is_cuda:
            from attention_worker.plugin.device_model_steps import reserved_bytes

            engine = engine_of(config, topk_indices_buffer.device)
            reserved = reserved_bytes(geometry_of(config, (number,), PAGE), engine)
        _layers[k_cache.prefix] = _Layer(number, topk_tokens, reserved)

    def forward_native(self, hidden_states: Tensor, q_quant: Any, k: Any, weights: Tensor) -> Any:
        if not self._is_ours:
            return super().forward_native(hidden_states, q_quant, k, weights)
        return self._select(q_quant, k, weights)

    def forward_cuda(self, hidden_states: Tensor, q_quant: Any, k: Any, weights: Tensor) -> Any:
        if not self._is_ours:
            return super().forward_cuda(hidden_states, q_quant, k, weights)
        return self._select(q_quant, k, weights)

    def forward_cpu(self, hidden_states: Tensor, q_quant: Any, k: Any, weights: Tensor) -> Any:
        if not self._is_ours:
            return super().forward_cpu(hidden_states, q_quant, k, weights)
        return self._select(q_quant, k, weights)

    def _select(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        name = _encode(self.k_cache.prefix)
        _operator(q, k, weights, self.topk_indices_buffer, name)
        return self.topk_indices_buffer


def install() -> None:
    """Replace vLLM's operator and its metadata builder."""
    replace_indexer(ServiceIndexer, IndexerMetadataBuilder)
