"""What both sides tell of a step, and when they tell nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import Source
from ipc_handoff.findings import Finding, FindingKind
from tests.support.findings import Kept
from tests.support.plants import Pair, pair
from tests.support.waiting import eventually
from tests.support.workloads import Case, Shape


class Both:
    def __init__(self) -> None:
        self.worker, self.service = Kept(), Kept()

    @property
    def all(self) -> list[Finding]:
        return self.worker.findings + self.service.findings


@contextmanager
def listened(tmp_path: Path, **options: Any) -> Iterator[tuple[Pair, Both]]:
    both = Both()
    with pair(tmp_path, worker_finds=both.worker, service_finds=both.service, **options) as running:
        yield running, both


def _two_requests(running: Pair) -> Case:
    while True:
        case = running.case()
        if case.inputs.requests > 1:
            return case


def _torn(case: Case) -> Any:
    exact = case.inputs.seq_lens.tolist()
    lengths = case.inputs.seq_lens.clone()
    lengths[1] -= 1
    names = [f"chat-{number}" for number in range(len(exact))]
    return replace(case.inputs, seq_lens=lengths, exact_seq_lens=exact, request_ids=names)


def test_both_sides_name_the_row_and_the_worker_the_engines_request(tmp_path: Path) -> None:
    with listened(tmp_path) as (running, both):
        case = _two_requests(running)
        inputs = _torn(case)
        row = int(inputs.query_start[1])
        with running.session.step(inputs, case.layers) as step:
            for layer in case.layers:
                _, out = running.ask(step, case, layer)
                assert bool((out[row : int(inputs.query_start[2])] == -1).all())
        running.reports.of(step.number)
        running.step()  # reads the report, if it has not
        expected = (FindingKind.TORN_INPUT, step.number, row, str(int(inputs.seq_lens[1]) + 1))
        for kept, name in ((both.worker, "chat-1"), (both.service, "#1")):
            (found,) = kept.findings
            assert (found.kind, found.step, found.row, found.expected) == expected
            assert (found.request, found.stage, found.epoch) == (
                name, "dsa.gate", running.session.epoch,
            )  # fmt: skip
        assert running.session.statistics.faulted_rows > 0


def test_switched_off_nothing_is_told_and_rows_are_guarded_as_before(tmp_path: Path) -> None:
    off: dict[str, Any] = {"detectors": "none", "client": {"detectors": "none"}}
    with listened(tmp_path, **off) as (running, both):
        case = _two_requests(running)
        inputs = _torn(case)
        with running.session.step(inputs, case.layers) as step:
            _, out = running.ask(step, case, case.layers[0])
        assert bool((out[int(inputs.query_start[1])] == -1).all())
        running.step()
        assert running.reports.of(step.number).fault_count
        assert both.all == []


@pytest.mark.parametrize("asked", [0, 1])
def test_a_step_that_is_left_is_no_race_though_its_slot_is_used_again(
    asked: int, tmp_path: Path
) -> None:
    with listened(tmp_path, shape=Shape(slots=1)) as (running, both):
        for _ in range(30):
            case = running.case()
            with running.session.step(case.inputs, case.layers) as step:
                for layer in case.layers[:asked]:
                    running.ask(step, case, layer)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()
        assert both.all == []


def test_a_session_that_the_service_ends_is_told_with_its_layer(tmp_path: Path) -> None:
    with listened(tmp_path, gate_bound_seconds=30.0) as (running, both):
        running.step()
        attachment = running.session._attachment
        assert attachment is not None
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            running.ask(step, case, case.layers[0])
            attachment.control_plane.close_session(
                pb.CloseSessionRequest(session_id=attachment.session_id, epoch=attachment.epoch)
            )
            for layer in case.layers[1:]:
                running.ask(step, case, layer)
        (found,) = both.worker.findings
        assert (found.kind, found.step, found.layer) == (
            FindingKind.WAIT_ENDED, step.number, case.layers[1],
        )  # fmt: skip
        assert both.service.findings == []  # it was asked to


def test_a_layer_that_shares_gets_this_steps_selection_or_none(tmp_path: Path) -> None:
    with listened(tmp_path) as (running, both):
        geometry = running.session.geometry
        buffer = torch.full((geometry.max_rows, geometry.top_k), -2, dtype=torch.int32)
        first = running.case(decode_only=True)
        layer = first.layers[0]

        def select(step: Any, case: Case) -> torch.Tensor:
            out = buffer[: case.inputs.rows]
            query = case.queries[layer]
            step.select(layer, query.q, query.weights, out=out)
            return out

        with running.session.step(first.inputs, first.layers) as step:
            out = select(step, first)
            assert step.share(layer + 1, out)
            assert torch.equal(out, first.expected[layer])
        second = running.case(decode_only=True)
        with running.session.step(second.inputs, second.layers) as step:
            stale = buffer[: second.inputs.rows]
            assert not step.share(layer + 1, stale)
            assert bool((stale == -1).all())
            out = select(step, second)
            assert step.share(layer + 1, out)
            assert torch.equal(out, second.expected[layer])
            foreign = torch.zeros_like(out)
            assert not step.share(layer + 1, foreign)
        leaks = both.all
        assert [found.kind for found in leaks] == [FindingKind.SHARED_INDEX_LEAK] * 2
        assert leaks[0].seen == f"step 1, layer {layer}"
        assert leaks[1].seen == "nothing that was handed back"


def test_a_broken_listener_costs_no_step(tmp_path: Path) -> None:
    class Broken:
        def found(self, finding: Finding) -> None:
            raise RuntimeError("planted")

    with pair(tmp_path, worker_finds=Broken(), service_finds=Broken()) as running:
        case = _two_requests(running)
        with running.session.step(_torn(case), case.layers) as step:
            assert running.ask(step, case, case.layers[0])[0] is Source.SERVICE
        assert eventually(lambda: running.session.statistics.faulted_rows >= 0)
        assert set(running.step()) == {Source.SERVICE}
