"""What vLLM's CPU platform lacks for sparse attention. It has none of its own: models without it
are left as they are.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from attention_worker.plugin.layers import PAGE
from attention_worker.vllm_compat import BACKEND_PATH, wrap_once
from indexer_service.kernels.k_cache.reference import quantise

_DECIDED_BY_THE_USER = (
    ("scheduler_config", "enable_chunked_prefill"),
    ("scheduler_config", "max_num_batched_tokens"),
    ("cache_config", "enable_prefix_caching"),
)
"""What the platform turns off for every model with latent attention."""


def complete() -> None:
    """Let models with sparse attention start on a CPU. Doing it again does nothing."""
    from vllm.platforms.cpu import CpuPlatform

    _wrap_class_method(CpuPlatform, "get_attn_backend_cls", _choose_backend)
    _wrap_class_method(CpuPlatform, "check_and_update_config", _keep_configuration)


def quantise_queries(x: Tensor, group_size: int, **_: Any) -> tuple[Tensor, Tensor]:
    """Index queries to e4m3 with a power-of-two scale each, as vLLM's kernel does it.

    Args:
        x: [N, group_size].

    Returns:
        float8_e4m3fn [N, group_size] and fp32 [N, 1].
    """
    if x.shape[-1] != group_size:
        raise ValueError(f"x: {list(x.shape)} (fix: rows of {group_size}, one group each)")
    values, scales = quantise(x)
    return values, scales.unsqueeze(1)


def _choose_backend(choose: Callable[..., str]) -> Callable[..., str]:
    @wraps(choose)
    def chosen(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *more: Any, **named: Any
    ) -> str:
        if attn_selector_config.use_sparse:
            return BACKEND_PATH
        return choose(cls, selected_backend, attn_selector_config, *more, **named)

    return chosen


def _keep_configuration(check: Callable[..., None]) -> Callable[..., None]:
    @wraps(check)
    def checked(cls: Any, vllm_config: Any) -> None:
        model = vllm_config.model_config
        if model is None or not hasattr(model.hf_text_config, "index_topk"):
            check(cls, vllm_config)
            return
        cache = vllm_config.cache_config
        if cache.user_specified_block_size and cache.block_size != PAGE:
            raise ValueError(f"block_size: {cache.block_size} (fix: {PAGE}, or none)")
        before = [getattr(getattr(vllm_config, at), name) for at, name in _DECIDED_BY_THE_USER]
        check(cls, vllm_config)
        for (at, name), value in zip(_DECIDED_BY_THE_USER, before, strict=True):
            setattr(getattr(vllm_config, at), name, value)
        cache.block_size = PAGE

    return checked


def _wrap_class_method(owner: type, name: str, extend: Callable[[Any], Any]) -> None:
    """As `wrap_once`: what `extend` gets and returns are functions of the class."""

    def extended(bound: Any) -> Any:
        return classmethod(extend(bound.__func__))

    wrap_once(owner, name, extended)
