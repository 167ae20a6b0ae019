"""One trace a step over both sides, whatever becomes of the step."""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, Tracer
from opentelemetry.trace import StatusCode

from indexer_client import Source, StepInputs
from indexer_client.plan_channel import RingPlans
from indexer_service.events import FinishedStep, StepObserver
from ipc_handoff.layout import STAMPED_STEPS
from ipc_handoff.stages import SERVICE_SPANS, STEP_SPAN, WORKER_SPANS
from ipc_handoff.stamps import StampRing
from ipc_handoff.telemetry import tracing as tracing_module
from ipc_handoff.telemetry.tracing import Tracing
from tests.support.plants import pair
from tests.support.traces import Traced, assert_whole, attended_step, traced
from tests.support.waiting import SOON
from tests.support.workloads import Shape

WORKER = tuple(span.name for span in WORKER_SPANS)
SERVICE = tuple(span.name for span in SERVICE_SPANS)
STAGES = (
    "dsa.stage",
    "dsa.gate",
    "dsa.logits",
    "dsa.topk",
    "dsa.answer",
    "dsa.handback",
    "dsa.attend",
)
"""In the order in which they end."""
LAYERS = 3


def _status_of(spans: list[ReadableSpan], name: str) -> set[str]:
    return {str(s.attributes["dsa.status"]) for s in spans if s.name == name and s.attributes}


def test_a_step_is_one_trace_with_every_stage_of_every_layer(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, both):
        ids = [attended_step(running) for _ in range(4)]
        running.checker.assert_right()
    assert len(set(ids)) == 4
    by_step = both.by_step()
    assert sorted(by_step) == [1, 2, 3, 4]
    for number, spans in by_step.items():
        step = assert_whole(spans)
        assert f"{step.context.trace_id:032x}" == ids[number - 1]
        assert step.status.status_code is StatusCode.UNSET
        counts = Counter(span.name for span in spans)
        assert counts == {STEP_SPAN: 1} | dict.fromkeys(STAGES, LAYERS)
        assert _status_of(spans, "dsa.gate") == {"STEP_STATUS_ANSWERED"}
    assert set(both.stages("worker")) == {STEP_SPAN, *WORKER}
    assert set(both.stages("service")) == set(SERVICE)


def test_stages_of_a_layer_follow_each_other_over_both_sides(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, both):
        attended_step(running)
    by_layer = defaultdict(dict)
    for span in both.by_step()[1]:
        if span.name != STEP_SPAN:
            assert span.attributes is not None
            by_layer[span.attributes["dsa.layer"]][span.name] = span
    assert len(by_layer) == LAYERS
    for stages in by_layer.values():
        ends = [stages[name].end_time for name in STAGES]
        assert ends == sorted(ends)
        assert stages["dsa.logits"].start_time == stages["dsa.gate"].end_time
        assert stages["dsa.handback"].start_time >= stages["dsa.answer"].end_time


def test_a_cancelled_step_says_so_and_ends_its_spans(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, both):
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            running.ask(step, case, case.layers[0])
            running.pause()
            for layer in case.layers[1:]:
                source, _ = running.ask(step, case, layer)
                assert source is Source.INLINE
    spans = both.by_step()[1]
    step_span = assert_whole(spans)
    assert step_span.status.status_code is StatusCode.UNSET
    gates = [span for span in spans if span.name == "dsa.gate"]
    assert _status_of(spans, "dsa.gate") == {"STEP_STATUS_CANCELLED"}
    assert [gate.status.status_code for gate in gates] == [StatusCode.UNSET, StatusCode.ERROR]
    assert Counter(span.name for span in spans)["dsa.logits"] == 1
    assert not any("dsa.incomplete" in (span.attributes or {}) for span in spans)


def test_an_engine_that_fails_shows_in_its_stage(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, both):
        running.engine.fail = True
        assert set(running.step()) == {Source.INLINE}
    spans = both.by_step()[1]
    assert_whole(spans)
    assert _status_of(spans, "dsa.gate") == {"STEP_STATUS_FAILED"}
    (logits,) = [span for span in spans if span.name == "dsa.logits"]
    assert logits.status.status_code is StatusCode.ERROR
    assert both.stages("service")["dsa.topk"] == 0


def test_an_error_of_the_engine_inside_a_step_is_the_steps_status(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, both):
        case = running.case()
        with pytest.raises(RuntimeError), running.session.step(case.inputs, case.layers):
            raise RuntimeError("of the engine")
        running.step()
    step = assert_whole(both.by_step()[1])
    assert step.status.status_code is StatusCode.ERROR
    assert step.events[-1].name == "exception"


def test_a_step_that_cannot_begin_ends_its_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("Value out of range")

    with traced(tmp_path) as (running, both):
        case = running.case()
        with monkeypatch.context() as patch:
            patch.setattr(StepInputs, "plan", fail)
            with pytest.raises(ValueError), running.session.step(case.inputs, case.layers):
                raise AssertionError("the step has begun")
        running.step()
    (step,) = [span for span in both.by_step()[1] if span.name == STEP_SPAN]
    assert step.status.status_code is StatusCode.ERROR


def test_reports_that_cannot_be_read_end_the_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens there."""

    def fail(*_: object) -> None:
        raise MemoryError

    with traced(tmp_path) as (running, both):
        case = running.case()
        with monkeypatch.context() as patch:
            patch.setattr(RingPlans, "reports", fail)
            with (
                pytest.raises(MemoryError),
                running.session.step(case.inputs, case.layers) as step,
            ):
                running.checker.run(step, case)
        running.step()
    assert STEP_SPAN in {span.name for span in both.by_step()[1]}


def test_a_stalled_service_is_told_by_the_worker_as_incomplete(tmp_path: Path) -> None:
    """And by nobody else: it exports nothing of a step that was taken from it."""
    with traced(tmp_path) as (running, both):
        attended_step(running)
        with running.stalled():
            attended_step(running)
        running.session.wait_attached(SOON)
        attended_step(running)
        running.checker.assert_right()
    spans = both.by_step()[2]
    step = assert_whole(spans)
    assert "detached" in {event.name for event in step.events}
    lost = [span for span in spans if span.name in SERVICE]
    assert {span.name for span in lost} == {"dsa.gate", "dsa.logits"}
    assert all(span.attributes and span.attributes["dsa.incomplete"] for span in lost)
    assert {span.resource.attributes["service.name"] for span in lost} == {"worker"}
    for number in (1, 3):
        found = both.by_step()[number]
        assert_whole(found)
        assert not any("dsa.incomplete" in (span.attributes or {}) for span in found)


def test_steps_that_are_not_sampled_export_nothing_on_either_side(tmp_path: Path) -> None:
    with traced(tmp_path, ratio=0.0) as (running, both):
        for _ in range(3):
            attended_step(running)
        running.checker.assert_right()
    assert not both.spans("worker")
    assert not both.spans("service")


def test_both_sides_keep_the_same_share_of_steps(tmp_path: Path) -> None:
    with traced(tmp_path, ratio=0.5, shape=Shape(layers=(1,), requests=1)) as (running, both):
        for _ in range(40):
            running.step()
    steps = {span.context.trace_id for span in both.spans("worker")}
    assert {span.context.trace_id for span in both.spans("service")} == steps
    assert 5 < len(steps) < 35


def test_a_span_that_never_ends_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=STEP_SPAN), traced(tmp_path) as (running, both):
        running.step()
        both.tracings["worker"]._tracer.start_span(STEP_SPAN)


def test_with_tracing_off_a_step_makes_no_opentelemetry_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("OpenTelemetry was called")

    with pair(tmp_path) as running:
        for owner, names in (
            (Tracer, ("start_span", "start_as_current_span")),
            (Tracing, ("begin_step", "stage_spans", "step_span", "client_call")),
            (tracing_module.trace, ("set_span_in_context", "get_current_span", "get_tracer")),
            (tracing_module.propagate, ("inject", "extract")),
            (tracing_module.otel_context, ("Context", "attach", "get_current")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, forbidden)
        for _ in range(3):
            assert set(running.step()) == {Source.SERVICE}
        assert attended_step(running) == ""
        running.checker.assert_right()


def _stamps_overwritten(patch: pytest.MonkeyPatch, of: Callable[[StampRing], bool]) -> None:
    """Another step takes the block before it is read."""
    read = StampRing.read

    def late(ring: StampRing, step: int) -> object:
        if of(ring):
            ring.begin(step + STAMPED_STEPS)
        return read(ring, step)

    patch.setattr(StampRing, "read", late)


@pytest.mark.parametrize("side", ["worker", "service"])
def test_overwritten_stamps_are_counted_and_not_shown(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced(tmp_path) as (running, both):
        rings: list[StampRing] = []
        own = running.session._stamps

        def chosen(ring: StampRing) -> bool:
            if (ring is own) != (side == "worker"):
                return False
            rings.append(ring)
            return True

        _stamps_overwritten(monkeypatch, chosen)
        attended_step(running)
        attended_step(running)
        running.checker.assert_right()
        if side == "worker":
            assert running.session.statistics.lost_stamps == 2
    assert rings and rings[0].lost == 2
    assert STEP_SPAN in both.stages("worker")
    shown = {"worker": WORKER, "service": SERVICE}[side]
    assert not set(both.stages(side)) & set(shown)
    assert both.stages("service" if side == "worker" else "worker")


def test_a_refused_plan_shows_no_stage_of_the_step_before_it(tmp_path: Path) -> None:
    with traced(tmp_path) as (running, both):
        attended_step(running)
        attachment = running.session._attachment
        assert attachment is not None
        plan = running.case().inputs.plan(1, attachment.epoch, [2])
        plan.trace.trace_id, plan.trace.span_id, plan.trace.flags = b"\1" * 16, b"\2" * 8, 1
        with pytest.raises(Exception, match=r"plan\.step"):
            attachment.select_top_k(plan)
        attended_step(running)
    assert all(status != "STEP_STATUS_REJECTED" for status in _statuses(both))


def test_an_observer_that_fails_disturbs_no_step(tmp_path: Path) -> None:
    class Failing(StepObserver):
        def step_finished(self, _: FinishedStep) -> None:
            raise RuntimeError("of the observer")

    with pair(tmp_path, observer=Failing()) as running:
        for _ in range(3):
            assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def _statuses(both: Traced) -> list[str]:
    return [str(span.attributes["dsa.status"]) for span in both.spans("service") if span.attributes]
