"""Inputs that are torn, rewritten or out of range: -1 for their rows, a report, and no crash."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import Source, StepInputs
from tests.support.plants import Pair, pair
from tests.support.workloads import Case

NEGATIVE = pb.ROW_FAULT_REASON_NEGATIVE_LENGTH
BEYOND = pb.ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS
PAGE = pb.ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS
TORN = pb.ROW_FAULT_REASON_TORN_INPUT
OFFSETS = pb.ROW_FAULT_REASON_QUERY_OFFSETS


def _with_length(length: int) -> Callable[[StepInputs, int], StepInputs]:
    def change(inputs: StepInputs, request: int) -> StepInputs:
        lengths = inputs.seq_lens.clone()
        lengths[request] = length
        return replace(inputs, seq_lens=lengths, exact_seq_lens=None)

    return change


def _beyond_the_bound(inputs: StepInputs, request: int) -> StepInputs:
    return _with_length(inputs.max_length + 1)(inputs, request)


def _not_the_exact_one(inputs: StepInputs, request: int) -> StepInputs:
    exact = inputs.seq_lens.tolist()
    changed = _with_length(exact[request] - 1)(inputs, request)
    return replace(changed, exact_seq_lens=exact)


def _with_page(page: int) -> Callable[[StepInputs, int], StepInputs]:
    def change(inputs: StepInputs, request: int) -> StepInputs:
        table = inputs.block_table.clone()
        table[request, 0] = page
        return replace(inputs, block_table=table)

    return change


def _narrow_table(inputs: StepInputs, request: int) -> StepInputs:
    """The table ends before this request's length does."""
    keep = (int(inputs.seq_lens[request]) - 1) // 32
    return replace(inputs, block_table=inputs.block_table[:, :keep])


FAULTS = {
    "negative length": (_with_length(-1), NEGATIVE),
    "most negative length": (_with_length(-(2**31)), NEGATIVE),
    "length beyond the bound": (_beyond_the_bound, BEYOND),
    "longest length": (_with_length(2**31 - 1), BEYOND),
    "length is not the exact one": (_not_the_exact_one, TORN),
    "page beyond the cache": (_with_page(10_000), PAGE),
    "largest page": (_with_page(2**31 - 1), PAGE),
    "negative page": (_with_page(-1), PAGE),
}


def _rows_of(inputs: StepInputs, request: int) -> range:
    begin, end = inputs.query_start[request : request + 2].tolist()
    return range(begin, end)


def _several_requests(running: Pair) -> Case:
    while True:
        case = running.case()
        if len(case.inputs.seq_lens) > 2:
            return case


def _answers(running: Pair, case: Case, inputs: StepInputs) -> tuple[int, list[torch.Tensor]]:
    """Answers of a step with other inputs than its case's; the step's number."""
    answers = []
    with running.session.step(inputs, case.layers) as step:
        for layer in case.layers:
            source, out = running.ask(step, case, layer)
            assert source is Source.SERVICE
            answers.append(out)
    return step.number, answers


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_rows_that_cannot_be_trusted_are_minus_one_and_reported(
    fault: str, signalling: str, tmp_path: Path
) -> None:
    change, reason = FAULTS[fault]
    with pair(tmp_path, client={"signalling": signalling}) as running:
        for request in range(3):
            case = _several_requests(running)
            bad = _rows_of(case.inputs, request)
            number, answers = _answers(running, case, change(case.inputs, request))
            for layer, out in zip(case.layers, answers, strict=True):
                expected = case.expected[layer].clone()
                expected[bad.start : bad.stop] = -1
                assert torch.equal(out, expected)
            report = running.reports.of(number)
            assert report.status == pb.STEP_STATUS_ANSWERED
            assert report.fault_count == len(bad)
            assert [found.row for found in report.faults] == list(bad)
            assert {found.request for found in report.faults} == {request}
            assert {found.reason for found in report.faults} == {reason}
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()
        assert running.session.statistics.faulted_rows > 0


@pytest.mark.parametrize("requests", [1, 4])
def test_a_table_that_ends_before_the_length_reads_no_page_of_an_older_step(
    requests: int, tmp_path: Path
) -> None:
    """The staging slot still holds the pages of steps before; they must not be taken."""
    with pair(tmp_path) as running:
        for _ in range(6):  # fill every slot
            running.step()
        case = _several_requests(running)
        longest = int(case.inputs.seq_lens.argmax())
        narrow = _narrow_table(case.inputs, longest)
        reach = narrow.block_table.shape[1] * 32
        number, answers = _answers(running, case, narrow)
        for layer, out in zip(case.layers, answers, strict=True):
            expected = case.expected[layer].clone()
            for request, length in enumerate(case.inputs.seq_lens.tolist()):
                if length > reach:
                    rows = _rows_of(case.inputs, request)
                    expected[rows.start : rows.stop] = -1
            assert torch.equal(out, expected)
        assert running.reports.of(number).fault_count > 0
        running.checker.assert_right()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_torn_query_offsets_leave_no_row_to_trust(place: str, tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        case = _several_requests(running)
        starts = case.inputs.query_start.clone()
        starts[{"first": 0, "middle": 1, "last": -1}[place]] += 100
        number, answers = _answers(running, case, replace(case.inputs, query_start=starts))
        for out in answers:
            assert bool((out == -1).all())
        report = running.reports.of(number)
        assert report.status == pb.STEP_STATUS_ANSWERED
        assert report.fault_count == case.inputs.rows
        assert {found.reason for found in report.faults} == {OFFSETS}
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def _scribble(running: Pair, number: int) -> None:
    """What a torn buffer does: the staged lengths and tables change after the publish."""
    attachment = running.session._attachment
    assert attachment is not None
    slot = attachment.bank.staging_of(number)
    slot.seq_lens.fill_(20)
    slot.block_table.copy_(slot.block_table.flip(1))
    slot.query_start.add_(1)


def _rewritten_after_the_first_layer(running: Pair) -> None:
    case = running.case()
    with running.session.step(case.inputs, case.layers) as step:
        running.checker.sources.append([])
        for layer in case.layers:
            source, out = running.ask(step, case, layer)
            running.checker.check(step.number, layer, out, case, source)
            _scribble(running, step.number)


def test_inputs_rewritten_after_the_publish_change_no_answer(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        for _ in range(5):
            _rewritten_after_the_first_layer(running)
        running.checker.assert_right()
        assert not running.session.statistics.inline_layers


def test_without_the_private_copy_the_check_turns_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path) as running:
        monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: tensor)
        for _ in range(5):
            _rewritten_after_the_first_layer(running)
        monkeypatch.undo()
    assert running.wrong
