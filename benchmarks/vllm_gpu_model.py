"""The model that engines of the vLLM comparison run, and what they are asked."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepseek_v32 import config

SAMPLED_ROWS = 64
"""Of a prefill, at its end: their selections and attention outputs are compared."""

Batch = tuple[int, int]
"""Requests, and tokens of each one's prompt."""


@dataclass(frozen=True)
class Size:
    """A model and its work.

    Attributes:
        config: of the model, as in its config.json.
        options: of `vllm.LLM`.
        captured: batch sizes whose decode steps are graphs.
        prefill: prompts longer than k, whose log-probabilities are compared.
        decode: batches whose answers are compared, of `checked_tokens` each.
        load: the batch in whose middle the service is killed, `kill_after` seconds from its
            beginning; an answer has `load_tokens`.
        rows: batches whose decode steps are timed, over `timed_tokens`, `rounds` times.
    """

    config: Mapping[str, Any]
    options: Mapping[str, Any]
    captured: tuple[int, ...]
    prefill: Batch
    decode: tuple[Batch, ...]
    checked_tokens: int
    load: Batch
    load_tokens: int
    kill_after: float
    rows: tuple[Batch, ...]
    timed_tokens: int
    rounds: int


SIZES = {
    "gpu": Size(
        config=config(
            hidden=1024,
            layers=8,
            heads=16,
            vocabulary=2048,
            longest=262144,
            q_lora=512,
            index_heads=64,
            top_k=2048,
        ),
        # Engines start side by side: each must know how much memory is its own.
        options={
            "max_model_len": 140_000,
            "max_num_batched_tokens": 8192,
            "kv_cache_memory_bytes": 5 << 30,
            # Of which vLLM asks no more than that so much is free.
            "gpu_memory_utilization": 0.05,
        },
        captured=(1, 8, 32),
        prefill=(2, 6144),
        decode=((1, 4096), (5, 3000), (32, 2200)),
        checked_tokens=16,
        load=(8, 4096),
        load_tokens=6000,
        kill_after=4.0,
        rows=((1, 4096), (1, 65536), (8, 16384), (32, 4096), (1, 131072)),
        timed_tokens=64,
        rounds=5,
    ),
    "rehearsal": Size(
        config=config(
            hidden=256,
            layers=2,
            heads=4,
            vocabulary=512,
            longest=2048,
            q_lora=128,
            index_heads=16,
            top_k=64,
        ),
        options={
            "max_model_len": 512,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 64 << 20,
            "num_gpu_blocks_override": 64,
        },
        captured=(1, 2),
        prefill=(2, 192),
        decode=((1, 150), (2, 100)),
        checked_tokens=4,
        load=(2, 100),
        load_tokens=300,
        kill_after=1.5,
        rows=((1, 100), (2, 150)),
        timed_tokens=4,
        rounds=1,
    ),
}
"""The first one is that of docs/vllm.md; the second shows on a CPU that the comparison runs."""


def prompts(size: Size, batch: Batch) -> list[dict[str, list[int]]]:
    """As `LLM.generate` takes them; the same ones whenever they are asked for."""
    requests, tokens = batch
    return [
        {
            "prompt_token_ids": random.Random(request).choices(
                range(2, size.config["vocab_size"]), k=tokens
            )
        }
        for request in range(requests)
    ]


def unit_gain(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Weights with which every layer, and every token that is attended to, moves the logits.

    vLLM's own dummy weights are so small that attention vanishes from the result.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(20)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            values = torch.randn(weight.shape, generator=generator, device=device)
            weight.data.copy_((values * weight.shape[-1] ** -0.5).to(weight.dtype))
        else:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
