"""What the plugin's two metadata builders have in common."""

from typing import Any, ClassVar, TypeVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from attention_worker.plugin.limits import check_engine, check_shared_layers
from attention_worker.plugin.pinned_buffers import guard_pinned_buffers
from attention_worker.plugin.settings import PluginSettings

M = TypeVar("M")


class Builder(AttentionMetadataBuilder[M]):
    """Graphs are for uniform batches of decodes, which come first in every batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **_: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_engine(vllm_config)
        check_shared_layers(vllm_config)
        guard_pinned_buffers(vllm_config, device, PluginSettings())
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


def rows_per_decode(vllm_config: Any) -> int:
    """Of a decode request, the most; one without speculation."""
    speculative = vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    return 1 + (drafts or 0)
