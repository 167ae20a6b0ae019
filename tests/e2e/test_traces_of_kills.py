"""Traces of steps in which the service or the worker was killed, read from the files."""

import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from dsa_indexer_cli.trace.spans import Span, read_trace_file
from indexer_client import ClientSettings, Session, Source
from ipc_handoff.stages import SERVICE_SPANS, STEP_SPAN, ServiceStage
from tests.e2e.conftest import Start
from tests.support.runs import later
from tests.support.waiting import SOON, eventually
from tests.support.workers import WorkerProcess
from tests.support.workloads import Checker, RandomSteps, Shape

SERVICE = {span.name for span in SERVICE_SPANS}
SHAPE = Shape(layers=(1, 2, 3))


def _by_trace(*files: Path) -> dict[str, list[Span]]:
    """Spans of steps and stages by trace."""
    found = defaultdict(list)
    for file in files:
        for span in read_trace_file(file).spans:
            if span.name.startswith("dsa."):
                found[span.trace].append(span)
    return found


def _is_incomplete(span: Span) -> bool:
    return bool(span.attributes.get("dsa.incomplete"))


def _is_exported(session: Session, step: int) -> bool:
    assert session._attachment is not None
    return session._attachment.bells.is_exported(step)


def _waits_at_gate(session: Session, step: int, ordinal: int) -> bool:
    assert session._attachment is not None
    times = session._attachment.bank.control.service_stamps.read(step)
    return times is not None and times[ordinal][ServiceStage.GATE_BEGUN] > 0


@pytest.mark.parametrize("stage", ["before the layer", "behind its request"])
def test_the_worker_tells_of_a_service_that_died_in_the_step(
    stage: str, start: Start, client_settings: ClientSettings, tmp_path: Path
) -> None:
    worker_file, service_file = tmp_path / "worker.jsonl", tmp_path / "service.jsonl"
    service = start(trace_file=str(service_file))
    settings = client_settings.model_copy(update={"trace_file": worker_file})
    steps, checker = RandomSteps(SHAPE, 1), Checker()
    killed = ""
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        session.wait_attached(SOON)
        for number in range(6):
            case = steps.case(number)
            checker.sources.append([])
            with session.step(case.inputs, case.layers) as step:
                for layer, query in case.queries.items():
                    if number == 3 and layer == 2:
                        assert eventually(lambda: _is_exported(session, 3))
                        assert eventually(lambda: _waits_at_gate(session, step.number, 1))
                        if stage == "behind its request":
                            service.freeze()
                        else:
                            service.kill()
                    out = case.expected[layer].clone().fill_(-2)
                    step.stage(layer, query.q, query.weights)
                    if number == 3 and layer == 2:
                        service.kill()
                        killed = step.trace_id
                    answered = step.wait(layer)
                    if not answered:
                        step.compute_inline(layer, query.q, query.weights)
                    source = step.hand_back(layer, answered, out)
                    checker.check(step.number, layer, out, case, source)
    checker.assert_right()
    assert set(checker.sources[3]) == {Source.SERVICE, Source.INLINE}
    traces = _by_trace(worker_file, service_file)
    spans = traces[killed]
    lost = [span for span in spans if span.name in SERVICE]
    assert lost
    assert all(_is_incomplete(span) for span in lost)
    assert {span.service for span in lost} == {"dsa-indexer-worker"}
    counts = Counter(span.name for span in lost)
    # The first layer was answered; the second one's gate was where it died.
    assert counts["dsa.gate"] == 2
    assert counts["dsa.answer"] == 1
    assert len(traces) == 6
    for found in traces.values():
        assert [span.name for span in found].count(STEP_SPAN) == 1
        assert all(span.end for span in found)
    # Nobody tells twice of a step, and of whole steps nobody says that they are incomplete.
    for trace, found in traces.items():
        names = Counter((s.name, s.attributes.get("dsa.layer")) for s in found)
        assert max(names.values()) == 1
        if trace != killed:
            assert not any(map(_is_incomplete, found))


def test_the_service_ends_the_spans_of_a_worker_that_died(
    start: Start,
    client_settings: ClientSettings,
    moments: random.Random,
    tmp_path: Path,
) -> None:
    worker_file, service_file = tmp_path / "worker.jsonl", tmp_path / "service.jsonl"
    service = start(trace_file=str(service_file))
    settings = client_settings.model_copy(update={"trace_file": worker_file})
    seed = moments.randrange(2**20)
    for number in range(5):
        worker = WorkerProcess(seed + number, settings)
        assert eventually(lambda: worker.answered > 5, 2 * SOON)  # noqa: B023
        timer = later(moments.uniform(0, 0.05), worker.kill)
        timer.join()
        worker.kill()
    assert eventually(lambda: not service.status().sessions)
    assert service.stop() == 0
    of_service = _by_trace(service_file)
    assert of_service
    for spans in of_service.values():
        assert all(span.end for span in spans)
        # All of one step, under the one step span that the worker began.
        assert len({span.parent for span in spans}) == 1
        assert len({span.attributes["dsa.step"] for span in spans}) == 1
    statuses = Counter(
        span.attributes["dsa.status"] for spans in of_service.values() for span in spans
    )
    assert statuses["STEP_STATUS_ANSWERED"] > 0
    assert set(statuses) <= {"STEP_STATUS_ANSWERED", "STEP_STATUS_CANCELLED"}
