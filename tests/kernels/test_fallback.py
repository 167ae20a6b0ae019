"""InlineSelector: the worker's own indexer selects what the service selects."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_worker.fallback import InlineSelector
from indexer_client.inputs import StepInputs
from indexer_service.kernels.configuration import configuration
from indexer_service.kernels.step import RowFault, select_step
from tests.data.recording import TOP_K, Recording


@pytest.fixture
def inputs(recording: Recording) -> StepInputs:
    return StepInputs(
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=recording.decode.seq_lens.flatten().clone(),
        block_table=recording.decode.block_table,
        rows=2,
        decode_requests=2,
        rows_per_decode=1,
        max_length=2503,
        exact_seq_lens=recording.decode.seq_lens.flatten().tolist(),
    )


Telling = tuple[InlineSelector, list[tuple[int, list[RowFault]]]]


@pytest.fixture
def telling(recording: Recording) -> Telling:
    """A selector, and what it tells of faults."""
    told: list[tuple[int, list[RowFault]]] = []
    cache = recording.decode.k_cache
    return InlineSelector({4: cache}, TOP_K, on_faults=lambda *fault: told.append(fault)), told


def select(selector: InlineSelector, recording: Recording, inputs: StepInputs) -> Tensor:
    out = torch.full((2, TOP_K), 77, dtype=torch.int32)
    selector(4, recording.decode.q.squeeze(1), recording.decode.weights, inputs, out)
    return out


def test_the_bits_are_those_of_select_step(recording: Recording, inputs: StepInputs) -> None:
    selector = InlineSelector({4: recording.decode.k_cache}, TOP_K, workspace=1 << 20)
    expected = torch.full((2, TOP_K), 77, dtype=torch.int32)
    select_step(
        recording.decode.q.squeeze(1), recording.decode.weights, recording.decode.k_cache,
        inputs.query_start, inputs.seq_lens, inputs.block_table, TOP_K,
        decode_requests=2, rows_per_decode=1, out=expected,
    )  # fmt: skip
    ours = select(selector, recording, inputs)
    assert torch.equal(ours, expected)
    theirs = recording.attention.topk_indices
    assert [set(row) for row in ours.tolist()] == [set(row) for row in theirs.tolist()]


def test_a_bad_request_answers_minus_one_and_is_told(
    telling: Telling, recording: Recording, inputs: StepInputs
) -> None:
    selector, told = telling
    expected = select(selector, recording, inputs)
    assert told == []
    ours = select(selector, recording, replace(inputs, max_length=1000))
    assert torch.equal(ours[0], expected[0])
    assert (ours[1] == -1).all()
    assert told == [(4, [RowFault(1, "length_out_of_bounds", 1000, 2503)])]


@pytest.mark.parametrize("torn", ["length", "offset", "last offset"])
def test_torn_inputs_answer_minus_one_as_the_service_does(
    torn: str, recording: Recording, inputs: StepInputs, caplog: pytest.LogCaptureFixture
) -> None:
    selector = InlineSelector({4: recording.decode.k_cache}, TOP_K)
    expected = select(selector, recording, inputs)
    if torn == "length":
        inputs.seq_lens[0] -= 1
    else:
        inputs.query_start[1 if torn == "offset" else 2] += 1
    ours = select(selector, recording, inputs)
    select(selector, recording, inputs)
    assert (ours[0] == -1).all()
    assert torch.equal(ours[1], expected[1]) == (torn == "length")
    assert len(caplog.records) == 1
    assert ("torn_input" if torn == "length" else "query_offsets") in caplog.text


def test_offsets_that_the_cpu_knows_spare_the_requests_beside_a_torn_one(
    telling: Telling, recording: Recording, inputs: StepInputs
) -> None:
    selector, told = telling
    expected = select(selector, recording, inputs)
    inputs = replace(inputs, exact_query_start=[0, 1, 2])
    inputs.query_start[2] += 1
    ours = select(selector, recording, inputs)
    assert torch.equal(ours[0], expected[0])
    assert (ours[1] == -1).all()
    assert told == [(4, [RowFault(1, "query_offsets", 2, 3)])]


def test_the_shortest_cache_bounds_the_pages_of_all(
    recording: Recording, inputs: StepInputs
) -> None:
    cache = recording.decode.k_cache
    selector = InlineSelector({4: cache, 5: cache[:11]}, TOP_K)
    ours = select(selector, recording, inputs)
    assert (ours[0] >= 0).any()
    assert (ours[1] == -1).all()


def test_an_unknown_layer_is_named(recording: Recording, inputs: StepInputs) -> None:
    selector = InlineSelector({5: recording.decode.k_cache}, TOP_K)
    with pytest.raises(ValueError, match=r"^layer: 4 has no K cache \(fix: one of: 5\)$"):
        select(selector, recording, inputs)


def test_the_configuration_is_the_references(recording: Recording) -> None:
    selector = InlineSelector({4: recording.decode.k_cache}, TOP_K)
    assert selector.configuration == configuration("cpu-reference")
