"""The metadata builders as vLLM calls them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_worker.kernels.sparse_mla import warm_up
from attention_worker.plugin import attention_warm_up, indexer_metadata, metadata, sessions
from attention_worker.plugin.indexer_metadata import IndexerMetadataBuilder, engine_of
from attention_worker.plugin.layers import Model
from attention_worker.plugin.metadata import SparseMLAMetadataBuilder
from tests.vllm.made_up import NAMES, batch, config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("drafts", "rows", "padded_to", "expected"),
    [
        (0, [1, 1, 1], 0, [0, 1, 2]),
        (0, [1, 1, 0, 0], 4, [0, 1]),
        (1, [2, 2], 0, [0, 0, 1, 1]),
        (1, [1, 2], 0, [0, 1, 1]),
        (1, [2, 1, 5], 0, [0, 0, 1, 2, 2, 2, 2, 2]),
        (0, [7], 0, [0] * 7),
    ],
)
def test_rows_know_their_request(
    drafts: int, rows: list[int], padded_to: int, expected: list[int]
) -> None:
    builder = SparseMLAMetadataBuilder(None, [], config(drafts), CPU)
    metadata = builder.build(0, batch(rows, padded_to=padded_to))
    assert metadata.request_of_row[: sum(rows)].tolist() == expected
    assert metadata.request_of_row.dtype == torch.int32
    # vLLM's layer sends the rows that are decodes to the kernels of this project.
    assert len(metadata.request_of_row) == metadata.num_decode_tokens == (padded_to or sum(rows))


def test_a_graph_finds_the_same_requests_at_the_same_address() -> None:
    builder = SparseMLAMetadataBuilder(None, [], config(1), CPU)
    captured = builder.build_for_cudagraph_capture(batch([2, 2, 2, 2])).request_of_row
    between = builder.build(0, batch([1, 7])).request_of_row
    replayed = builder.build(0, batch([2, 2, 0, 0], padded_to=8)).request_of_row
    assert replayed.data_ptr() == captured.data_ptr() != between.data_ptr()
    assert captured.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_attention_is_compiled_once_for_a_ranks_heads_and_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def compiled(*asked: Any, query_dtype: torch.dtype) -> int:
        made.append((*asked, query_dtype))
        return 9

    monkeypatch.setattr(warm_up, "warm_up", compiled)
    made_up, gpu = config(), torch.device("cuda", 5)
    made_up.model_config.dtype = torch.bfloat16
    made_up.model_config.get_num_attention_heads = lambda parallel: 16
    for dtype in (torch.bfloat16, torch.uint8, torch.bfloat16):
        spec = SimpleNamespace(dtype=dtype)
        attention_warm_up.warm_up_attention(made_up, spec, gpu)
        attention_warm_up.warm_up_attention(made_up, spec, CPU)
    assert made == [
        (16, 64, torch.bfloat16, gpu, torch.bfloat16),
        (16, 64, torch.uint8, gpu, torch.bfloat16),
    ]


def test_the_builder_has_attention_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(metadata, "warm_up_attention", lambda *given: asked.append(given))
    made_up, spec = config(), SimpleNamespace(dtype=torch.uint8)
    SparseMLAMetadataBuilder(spec, [], made_up, CPU)
    assert asked == [(made_up, spec, CPU)]


class Noted:
    """Steps that note what is asked of them."""

    def __init__(self, model: Model, layers: tuple[int, ...], placement: str) -> None:
        self.made_for = (model, layers, placement)
        self.asked: list[Any] = []

    def begin(self, inputs: Any) -> None:
        self.asked.append(None if inputs is None else inputs.rows)

    def begin_capture(self, rows: int, rows_per_decode: int) -> None:
        self.asked.append((rows, rows_per_decode))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[Model, Noted]:
    """Steps by model, as the builder asks for them."""
    found: dict[Model, Noted] = {}

    def steps_of(model: Model, geometry: Any, caches: Any, engine: Any) -> Noted:
        assert tuple(sorted(caches)) == geometry.layers
        made = Noted(model, geometry.layers, engine.settings.placement)
        return found.setdefault(model, made)

    monkeypatch.setattr(indexer_metadata, "steps_of", steps_of)
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", "unix:/run/x")
    return found


def test_target_and_draft_have_steps_of_their_own(noted: dict[Model, Noted]) -> None:
    builder = IndexerMetadataBuilder(None, NAMES, config(1), CPU)
    target = builder.build(0, batch([2, 5]))
    assert target.steps is noted[Model.TARGET]
    assert noted[Model.TARGET].made_for == (Model.TARGET, (0, 1), "auto")
    assert builder.build_for_drafting(batch([1, 1]), 0).steps is noted[Model.DRAFT]
    assert noted[Model.DRAFT].made_for == (Model.DRAFT, (2,), "inline")
    assert noted[Model.TARGET].asked == [7]
    assert noted[Model.DRAFT].asked == [2]


def test_a_draft_alone_is_built_for_by_either_call(noted: dict[Model, Noted]) -> None:
    builder = IndexerMetadataBuilder(None, NAMES[2:], config(1), CPU)
    builder.build(0, batch([1]))
    builder.build_for_drafting(batch([1]), 1)
    assert noted.keys() == {Model.DRAFT}
    assert noted[Model.DRAFT].asked == [1, 1]


def test_a_capture_is_no_step(noted: dict[Model, Noted]) -> None:
    builder = IndexerMetadataBuilder(None, NAMES, config(1), CPU)
    builder.build_for_cudagraph_capture(batch([2, 2, 2, 2]))
    assert noted[Model.TARGET].asked == [(8, 2)]


def test_without_a_variable_steps_are_inline(
    noted: dict[Model, Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSA_INDEXER_ADDRESS")
    IndexerMetadataBuilder(None, NAMES, config(), CPU).build(0, batch([1]))
    assert noted[Model.TARGET].made_for[2] == "inline"


def test_each_gpu_has_a_service_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", "unix:/run/dsa-{device}/indexer.sock")
    engine = engine_of(config(), torch.device("cuda", 3))
    assert engine.settings.address == "unix:/run/dsa-3/indexer.sock"
    assert engine.settings.model_fields_set >= {"address"}


def test_caches_that_vllm_allocates_anew_get_new_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_open", {})
    made_up = config()
    builder = IndexerMetadataBuilder(None, NAMES[:2], made_up, CPU)
    first = builder.build(0, batch([1])).steps
    again = IndexerMetadataBuilder(None, NAMES[:2], made_up, CPU).build(0, batch([1])).steps
    assert again is first
    for layer in made_up.compilation_config.static_forward_context.values():
        layer.kv_cache = torch.zeros(6, 64, 132, dtype=torch.uint8)
    assert builder.build(0, batch([1])).steps is not first
