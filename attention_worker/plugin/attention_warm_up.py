"""Compile the attention kernels at start: not in the first requests."""

import logging
from functools import cache
from typing import Any

import torch

from attention_worker.kernels.sparse_mla.layout import LATENT, ROPE

logger = logging.getLogger(__name__)


def warm_up_attention(vllm_config: Any, kv_cache_spec: Any, device: torch.device) -> None:
    """For the batches of this rank; on a CPU there is nothing to compile.

    vLLM makes builders more than once; only the first of a kind has work.
    """
    if device.type != "cuda":
        return
    model = vllm_config.model_config
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    _once(heads, model.hf_text_config.index_topk, kv_cache_spec.dtype, model.dtype, device)


@cache
def _once(
    heads: int, top_k: int, cache_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    from attention_worker.kernels.sparse_mla.warm_up import warm_up  # Triton

    batches = warm_up(heads, top_k, cache_dtype, device, query_dtype=dtype)
    logger.info(
        "dsa-indexer: attention of %d heads of %d, %s: %d kinds of batches are compiled",
        *(heads, LATENT + ROPE, cache_dtype, batches),
    )
