"""Whose trace is kept is decided when a step is over, by either side, and holds for both."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from dsa_indexer_cli.trace.spans import read_trace_file
from indexer_client import ClientSettings, Session, Source
from indexer_client.worker_traces import WorkerTraces
from ipc_handoff.doorbells import ServiceBells, WorkerBells
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.layout import HELD_STEPS
from ipc_handoff.stages import FINDING_EVENT, SERVICE_SPANS, STEP_SPAN
from tests.e2e.conftest import Start
from tests.support.plants import Pair
from tests.support.traces import Traced, assert_whole, attended_step, traced
from tests.support.waiting import SOON, eventually
from tests.support.workers import WorkerProcess
from tests.support.workloads import Checker, RandomSteps, Shape

SMALL = Shape(layers=(1, 2), requests=1)
LAYERS = SMALL.layers
SERVICE = {span.name for span in SERVICE_SPANS}
WHOLE = len(LAYERS) * 7 + 1


def finding(
    pair: Pair, step: int, *, stage: str | None = None, layer: int | None = None
) -> Finding:
    attachment = pair.session._attachment
    assert attachment is not None
    return Finding(
        FindingKind.TORN_INPUT, step, attachment.epoch, layer, stage, 2, "cmpl-7", "40", "41"
    )


def events(spans: list[ReadableSpan]) -> list[tuple[str, dict[str, object]]]:
    """Findings: the span that carries each, and what it says."""
    return [
        (span.name, dict(event.attributes or {}))
        for span in spans
        for event in span.events
        if event.name == FINDING_EVENT
    ]


def found_by_worker(pair: Pair, both: Traced, step: int) -> None:
    pair.session.found(finding(pair, step))


def found_by_service(pair: Pair, both: Traced, step: int) -> None:
    both.telemetry.found(finding(pair, step))


Find = Callable[[Pair, Traced, int], None]
EITHER_SIDE = pytest.mark.parametrize("find", [found_by_worker, found_by_service])


@EITHER_SIDE
@pytest.mark.parametrize("when", ["inside", "behind"])
def test_a_step_with_a_finding_is_kept_on_both_sides_and_no_other_is(
    find: Find, when: str, tmp_path: Path
) -> None:
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        for _ in range(3):
            attended_step(running)
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            running.checker.run(step, case)
            for layer in case.layers:
                with step.attending(layer):
                    pass
            if when == "inside":
                find(running, both, 4)
        if when == "behind":
            find(running, both, 4)
        for _ in range(3):
            attended_step(running)
        running.checker.assert_right()
    by_step = both.by_step()
    assert list(by_step) == [4]
    assert_whole(by_step[4])
    assert {span.name for span in both.spans("service")} >= SERVICE
    stages = [span for span in by_step[4] if span.name != FINDING_EVENT]
    assert len(stages) == WHOLE
    ((_, told),) = events(by_step[4])
    assert told[FINDING_EVENT] == "torn_input"
    assert told["dsa.request"] == "cmpl-7"
    assert "pinned" in str(told["dsa.likely_cause"])


@EITHER_SIDE
def test_a_finding_is_an_event_of_the_stage_that_it_names(find: Find, tmp_path: Path) -> None:
    stage = "dsa.handback" if find is found_by_worker else "dsa.gate"
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            told = finding(running, 1, stage=stage, layer=2)
            (running.session if find is found_by_worker else both.telemetry).found(told)
            running.checker.run(step, case)
    carriers = [
        span
        for span in both.by_step()[1]
        if any(event.name == FINDING_EVENT for event in span.events)
    ]
    assert [(span.name, (span.attributes or {}).get("dsa.layer")) for span in carriers] == [
        (stage, 2)
    ]


@EITHER_SIDE
def test_a_finding_that_comes_when_the_step_has_left_gets_a_span_of_the_same_trace(
    find: Find, tmp_path: Path
) -> None:
    with traced(tmp_path, shape=SMALL) as (running, both):
        trace = attended_step(running)
        attachment = running.session._attachment
        assert attachment is not None
        assert eventually(lambda: attachment.bells.is_exported(1))
        find(running, both, 1)
    spans = both.by_step()[1]
    ((name, _),) = events(spans)
    assert name == FINDING_EVENT
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace}


@EITHER_SIDE
def test_a_finding_of_a_step_that_is_long_gone_disturbs_nothing(find: Find, tmp_path: Path) -> None:
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        for _ in range(HELD_STEPS + 90):
            running.step()
        find(running, both, 1)
        running.step()
    assert not both.spans("worker")
    assert not both.spans("service")


@pytest.mark.parametrize("side", ["worker", "service"])
def test_a_step_that_one_side_finds_slow_is_kept_on_both(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, late = time.monotonic_ns, [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock() + late[0] * 1_000_000_000)
    with traced(tmp_path, ratio=0.0, slow={side: 1000.0}, shape=SMALL) as (running, both):
        for number in range(1, 6):
            case = running.case()
            with running.session.step(case.inputs, case.layers) as step:
                running.ask(step, case, 1)
                if number == 3:
                    late[0] = 1500
                running.ask(step, case, 2)
    by_step = both.by_step()
    assert list(by_step) == [3]
    assert_whole(by_step[3])
    assert set(both.stages("service")) == SERVICE


def test_a_torn_length_is_found_kept_and_named_with_its_request(tmp_path: Path) -> None:
    """By the detectors themselves: the CPU has planned another length than what was staged."""
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        running.step()
        case = running.case()
        planned = [length - 1 for length in case.inputs.seq_lens.tolist()]
        torn = replace(case.inputs, exact_seq_lens=planned, request_ids=["cmpl-9"])
        with running.session.step(torn, case.layers) as step:
            for layer in case.layers:
                running.ask(step, case, layer)
        running.step()
    by_step = both.by_step()
    assert list(by_step) == [2]
    # Nothing of its row was scored: no stage was left open.
    assert all(span.status.is_unset for span in by_step[2])
    assert not {"dsa.logits", "dsa.topk"} & {span.name for span in by_step[2]}
    told = [attributes for _, attributes in events(by_step[2])]
    assert {attributes[FINDING_EVENT] for attributes in told} == {"torn_input"}
    assert {attributes["dsa.request"] for attributes in told} == {"cmpl-9", "#0"}
    assert {span.resource.attributes["service.name"] for span in by_step[2]} == {
        "worker",
        "service",
    }


def test_a_step_that_the_engine_failed_is_kept_on_both(tmp_path: Path) -> None:
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        running.step()
        running.engine.fail = True
        assert set(running.step()) == {Source.INLINE}
        running.engine.fail = False
        running.step()
    assert list(both.by_step()) == [2]
    assert both.stages("service")["dsa.logits"] == 1


@pytest.mark.parametrize("bells", [ServiceBells, WorkerBells])
def test_planted_bit_that_is_not_seen_leaves_half_a_trace(
    bells: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bells, "is_kept", lambda *_: False)
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        running.step()
        (running.session if bells is ServiceBells else both.telemetry).found(finding(running, 1))
        running.step()
    missing, other = ("service", "worker") if bells is ServiceBells else ("worker", "service")
    assert both.spans(other)
    assert not both.spans(missing)


def test_what_nobody_decides_about_is_bounded_on_both_sides(tmp_path: Path) -> None:
    with traced(tmp_path, ratio=0.0, shape=SMALL) as (running, both):
        for _ in range(HELD_STEPS + 20):
            running.step()
        traces = running.session._traces
        assert isinstance(traces, WorkerTraces)
        assert HELD_STEPS <= len(traces._held) < HELD_STEPS + 8
        assert traces.dropped == HELD_STEPS + 20 - len(traces._held)
        (held,) = both.telemetry._held.values()
        assert eventually(lambda: held.dropped == 20)
        assert len(held._steps) == HELD_STEPS
    assert not both.telemetry._held
    assert not both.spans("worker")
    assert not both.spans("service")


def test_a_step_says_where_it_was_answered(tmp_path: Path) -> None:
    """And whose it was, where the engine has told."""
    with traced(tmp_path) as (running, both):
        case = running.case()
        ids = [f"cmpl-{number}" for number in range(case.inputs.requests)]
        with running.session.step(replace(case.inputs, request_ids=ids), case.layers) as step:
            running.checker.run(step, case)
        attachment = running.session._attachment
        assert attachment is not None
        epoch, bank = attachment.epoch, attachment.bank.number
        with running.stalled():
            running.step()
        running.session.wait_attached(SOON)
        running.step()
    by_step = both.by_step()
    told = {n: dict(assert_whole(spans).attributes or {}) for n, spans in by_step.items()}
    assert tuple(told[1].pop("dsa.request_ids")) == tuple(ids)  # type: ignore[arg-type]
    assert told[1] == {
        "dsa.step": 1,
        "dsa.rows": case.inputs.rows,
        "dsa.requests": case.inputs.requests,
        "dsa.context": case.inputs.max_length,
        "dsa.epoch": epoch,
        "dsa.engine": "cpu-reference",
        "dsa.placement": "cpu",
        "dsa.bank": bank,
        "dsa.bank_generation": 1,
        "dsa.slot": 1,
    }
    assert "dsa.request_ids" not in told[3]
    assert told[3]["dsa.bank"] != bank
    sources = {
        (n, str((span.attributes or {}).get("dsa.source")))
        for n, spans in by_step.items()
        for span in spans
        if span.name == "dsa.handback"
    }
    assert sources == {(1, "service"), (2, "inline"), (3, "service")}
    for span in both.spans("service"):
        attributes = span.attributes or {}
        assert attributes["dsa.engine"] == "cpu-reference"
        assert attributes["dsa.placement"] == "cpu"
        assert attributes["dsa.context"]


def test_of_a_dead_service_the_worker_tells_what_is_kept_and_nothing_else(
    start: Start, client_settings: ClientSettings, tmp_path: Path
) -> None:
    files = tmp_path / "worker.jsonl", tmp_path / "service.jsonl"
    service = start(trace_file=str(files[1]))
    changed = {"trace_file": files[0], "trace_ratio": 0.0}
    settings = client_settings.model_copy(update=changed)
    steps, checker = RandomSteps(SMALL, 1), Checker()
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        session.wait_attached(SOON)

        def step(number: int) -> None:
            case = steps.case(number)
            with session.step(case.inputs, case.layers) as entered:
                checker.run(entered, case)

        for number in range(5):
            step(number)
        service.freeze()
        assert session.epoch is not None
        session.found(
            Finding(FindingKind.BAD_PAGE, 4, session.epoch, None, None, None, None, "a", "b")
        )
        service.kill()
        step(5)
        step(6)
    checker.assert_right()
    spans = [s for s in read_trace_file(files[0]).spans if "dsa.step" in s.attributes]
    of_service = {s.attributes["dsa.step"] for s in spans if s.name in SERVICE}
    assert all(s.attributes["dsa.incomplete"] for s in spans if s.name in SERVICE)
    assert 4 in {s.attributes["dsa.step"] for s in spans if s.name == STEP_SPAN}
    # The sixth may be the one in which the death was seen.
    assert {4} <= of_service <= {4, 6}
    assert not [s for s in read_trace_file(files[1]).spans if "dsa.step" in s.attributes]


def test_of_a_killed_worker_the_service_tells_no_step_that_went_well(
    start: Start, client_settings: ClientSettings, tmp_path: Path
) -> None:
    file = tmp_path / "service.jsonl"
    service = start(trace_file=str(file))
    wanted = {"trace_file": tmp_path / "worker.jsonl", "trace_ratio": 0.0}
    for seed in range(3):
        worker = WorkerProcess(seed, client_settings.model_copy(update=wanted))
        assert eventually(lambda: worker.answered > 5, 2 * SOON)  # noqa: B023
        worker.kill()
    assert eventually(lambda: not service.status().sessions)
    assert service.stop() == 0
    spans = [s for s in read_trace_file(file).spans if "dsa.step" in s.attributes]
    assert {span.attributes["dsa.status"] for span in spans} <= {"STEP_STATUS_CANCELLED"}
