"""Memory of the worker's GPU that vLLM's profile must see before the sessions take it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_worker.plugin import indexer_op
from attention_worker.plugin.device_model_steps import reserved_bytes
from attention_worker.plugin.indexer_metadata import engine_of, geometry_of
from tests.vllm.made_up import config

GPU = torch.device("cuda", 0)
MIB = 1 << 20


def reserved() -> int:
    """Of an engine with the environment's settings."""
    made_up = config()
    return reserved_bytes(geometry_of(made_up, (0, 1), 64), engine_of(made_up, GPU))


def test_a_services_budget_is_left_to_it_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inline = reserved()
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", "unix:/run/nobody")
    monkeypatch.setenv("DSA_INDEXER_SERVICE_MEMORY_MIB", "0")
    banks = reserved() - inline
    layout = geometry_of(config(), (0, 1), 64).device
    assert banks == 2 * (layout.staging_size + layout.answers_size) > 0
    monkeypatch.delenv("DSA_INDEXER_SERVICE_MEMORY_MIB")
    assert reserved() == inline + banks + 1024 * MIB
    monkeypatch.setenv("DSA_INDEXER_SERVICE_MEMORY_MIB", "3000")
    assert reserved() == inline + banks + 3000 * MIB
    monkeypatch.setenv("DSA_INDEXER_SERVICE_DEVICE", "1")  # the service has memory of its own
    assert reserved() == inline + banks


def test_a_dummy_run_takes_it_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at the peak of its first forward, which has no metadata."""
    taken: list[tuple[Any, ...]] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        taken.append((*size, options.get("dtype"), str(options.get("device"))))
        return empty(0)

    layer = indexer_op._Layer(number=0, top_k=64, reserved_bytes=5 * MIB)
    monkeypatch.setitem(indexer_op._layers, "model.layers.0.indexer.k_cache", layer)
    monkeypatch.setattr(
        indexer_op, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None)
    )
    nothing = torch.zeros(1, device="meta")
    name = indexer_op._encode("model.layers.0.indexer.k_cache")
    monkeypatch.setattr(torch, "empty", noted)
    indexer_op.select_indices(nothing, nothing, nothing, nothing, name)
    assert taken == [(5 * MIB, torch.uint8, "meta")]
