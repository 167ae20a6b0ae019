"""The metadata of vLLM's indexer layers: `build` runs eagerly before every forward, also before
the replay of a full graph, and begins the step.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata

from attention_worker.plugin.batches import step_inputs
from attention_worker.plugin.builder import Builder, rows_per_decode
from attention_worker.plugin.layers import Model, k_caches, layer_number, model_of
from attention_worker.plugin.limits import why_no_service
from attention_worker.plugin.model_steps import Engine, ModelSteps
from attention_worker.plugin.sessions import steps_of
from attention_worker.plugin.settings import PluginSettings, asks_for_plugin, asks_for_service
from attention_worker.vllm_compat import lengths_on_cpu
from indexer_client.settings import ClientSettings
from ipc_handoff.layout import HandoffGeometry

logger = logging.getLogger(__name__)

_SLOTS = 2


@dataclass
class IndexerMetadata(AttentionMetadata):
    """Attributes:
    slot_mapping: int64 [n], where the batch's keys go, -1: nowhere.
    steps: of the model whose forward comes.
    """

    slot_mapping: Tensor
    steps: ModelSteps


class IndexerMetadataBuilder(Builder[IndexerMetadata]):
    """Made by vLLM when the engine starts, and again when its KV cache is allocated anew."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        config = self.vllm_config
        self._names: dict[Model, dict[int, str]] = {}
        target_layers = config.model_config.hf_text_config.num_hidden_layers
        for name in self.layer_names:
            number = layer_number(name)
            self._names.setdefault(model_of(number, target_layers), {})[number] = name
        engine = engine_of(config, self.device)
        # A draft's layer is one of many: its hand-over would take longer than its selection.
        inline = _inline(engine.settings)
        self._engines = {Model.TARGET: engine, Model.DRAFT: replace(engine, settings=inline)}
        self._speculates = config.speculative_config is not None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> IndexerMetadata:
        return self._begin(_first(Model.TARGET, self._names), common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> IndexerMetadata:
        return self._begin(_first(Model.DRAFT, self._names), common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> IndexerMetadata:
        steps, _ = self._steps(_first(Model.TARGET, self._names))
        steps.begin_capture(
            common_attn_metadata.num_actual_tokens, common_attn_metadata.max_query_len
        )
        return IndexerMetadata(common_attn_metadata.slot_mapping, steps)

    def _begin(self, model: Model, common: Any) -> IndexerMetadata:
        steps, geometry = self._steps(model)
        steps.begin(step_inputs(common, geometry, self._lengths(common)))
        return IndexerMetadata(common.slot_mapping, steps)

    def _steps(self, model: Model) -> tuple[ModelSteps, HandoffGeometry]:
        context = self.vllm_config.compilation_config.static_forward_context
        caches = k_caches(self._names[model], context)
        geometry = geometry_of(self.vllm_config, tuple(sorted(caches)), _page(caches))
        return steps_of(model, geometry, caches, self._engines[model]), geometry

    def _lengths(self, common: Any) -> Sequence[int] | None:
        """Exact ones only: others would be reported as a race."""
        known = common.seq_lens
        if self.device.type != "cpu":
            known = None if self._speculates else lengths_on_cpu(common)
        return None if known is None else known[: common.num_reqs].tolist()


def engine_of(vllm_config: Any, device: torch.device) -> Engine:
    """What an engine's configuration and the environment say.

    Raises:
        ValueError: a service is wanted and cannot be had, and `on_refusal` is error.
    """
    settings, plugin = ClientSettings(), PluginSettings()
    if not asks_for_plugin(settings):
        settings = _inline(settings)
    elif asks_for_service(settings):
        why = why_no_service(vllm_config, device)
        if why is not None:
            if plugin.on_refusal == "error":
                raise ValueError(why)
            _warn_once(why)
            settings = _inline(settings)
    # A node has one service for each GPU, and all its workers the same environment.
    address = settings.address.replace("{device}", str(device.index or 0))
    return Engine(
        device=device,
        rows_per_decode=rows_per_decode(vllm_config),
        settings=settings.model_copy(update={"address": address}),
        plugin=plugin,
        name=str(vllm_config.model_config.model),
    )


def _inline(settings: ClientSettings) -> ClientSettings:
    """The same without a service."""
    return settings.model_copy(update={"placement": "inline"})


@cache
def _warn_once(why: str) -> None:
    """Every layer and every builder asks again."""
    logger.warning("dsa-indexer works inline: %s", why)


def geometry_of(vllm_config: Any, layers: tuple[int, ...], page: int) -> HandoffGeometry:
    """Of an engine's indexer layers."""
    config = vllm_config.model_config.hf_text_config
    scheduler = vllm_config.scheduler_config
    return HandoffGeometry(
        layers=layers,
        heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        top_k=config.index_topk,
        page_size=page,
        max_rows=scheduler.max_num_batched_tokens,
        max_requests=scheduler.max_num_seqs,
        max_context=vllm_config.model_config.max_model_len,
        slots=_SLOTS,
    )


def _first(wanted: Model, present: Collection[Model]) -> Model:
    """`wanted` if it has layers here, else the model that has."""
    return wanted if wanted in present else next(iter(present))


def _page(caches: dict[int, Tensor]) -> int:
    return next(iter(caches.values())).shape[1]
