"""Memory of the worker's GPU that vLLM's profile must see before the sessions take it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_worker.plugin import indexer_op

MIB = 1 << 20


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
