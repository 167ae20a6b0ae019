"""Traces and times of steps on a GPU, which end long after the host has enqueued them."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytest.importorskip("triton", reason="Triton exists on Linux only")

from attention_worker import device_traces
from attention_worker.device_traces import DeviceTraces
from indexer_client.metrics import WorkerMetrics
from indexer_client.statistics import Statistics
from indexer_client.step import Begun
from indexer_client.worker_traces import WorkerTraces
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.layout import HELD_STEPS
from ipc_handoff.stages import STEP_SPAN, WORKER_STAGES
from ipc_handoff.stamps import StepTimes
from ipc_handoff.telemetry.metrics import Metrics
from ipc_handoff.telemetry.settings import MetricSettings, TraceSettings
from ipc_handoff.telemetry.tracing import Tracing
from tests.support.waiting import SOON, eventually
from tests.support.workloads import RandomSteps, Shape

STEPS = RandomSteps(Shape(layers=(4, 8), requests=1), 1)
LAYERS = len(STEPS.geometry.layers)


class Event:
    """Of a device that is done when it is told so."""

    device_is_done = threading.Event()

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self.device_is_done.wait(SOON)


class Stamps:
    """Of steps whose stages last 100 ns each."""

    def __init__(self) -> None:
        self.read_steps: list[int] = []

    def read(self, step: int) -> StepTimes:
        self.read_steps.append(step)
        stamps = [1000 + 100 * stage for stage in WORKER_STAGES]
        return StepTimes([stamps] * LAYERS, clock_error=1500)


class Bells:
    """What the service has said."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self.kept: list[int] = []

    def is_kept(self, step: int) -> bool:
        return step in self.wanted

    def keep(self, step: int) -> None:
        self.kept.append(step)


class Bench:
    """Steps with a service, or (attached=False) without."""

    def __init__(self, ratio: float) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(TraceSettings("worker", ratio=ratio), [self._exporter])
        self.stamps, self.bells = Stamps(), Bells()
        self._reader = InMemoryMetricReader()
        self._metrics = Metrics(MetricSettings("worker"), [self._reader])
        self.traces = WorkerTraces(self.tracing, STEPS.geometry, self.stamps)
        metrics = WorkerMetrics(self._metrics, self._statistics, self.traces)
        self.device = DeviceTraces(self.traces, metrics, self.stamps)  # type: ignore[arg-type]
        self.added: list[int] = []
        self._attachment: Any = SimpleNamespace(
            epoch=7, engine="triton", placement="mps", detached_because="", bells=self.bells,
            bank=SimpleNamespace(number=1, control=SimpleNamespace(generation=3)),
            remote_traces=SimpleNamespace(add=lambda step, trace: self.added.append(step)),
        )  # fmt: skip
        self._number = 0

    def _statistics(self) -> Statistics:
        return Statistics()

    def step(self, attached: bool = True) -> int:
        self._number += 1
        self.device.end_step()
        trace = self.traces.begin(self._number, STEPS.case(1).inputs)
        attachment = self._attachment if attached else None
        self.device.begin_step(Begun(self._number, attachment, trace))
        return self._number

    def spans(self) -> list[Any]:
        """That have left."""
        self.tracing.flush()
        return list(self._exporter.get_finished_spans())

    def timed_steps(self) -> int:
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for metric in resource.scope_metrics[0].metrics:
                if metric.name == "dsa_indexer_step":
                    return sum(point.count for point in metric.data.data_points)
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    benches: list[Bench] = []
    monkeypatch.setattr(device_traces, "new_event", Event)
    monkeypatch.setattr(device_traces, "leave_captures_alone", lambda: None)
    monkeypatch.setattr(Event, "device_is_done", threading.Event())

    def make(ratio: float = 1.0) -> Bench:
        benches.append(Bench(ratio))
        return benches[-1]

    yield make
    Event.device_is_done.set()
    for bench in benches:
        bench.device.close()
        bench.tracing.close()


def test_a_step_is_told_when_the_device_is_done_and_not_before(made: Any) -> None:
    bench = made()
    bench.step()
    bench.device.end_step()
    assert bench.added == [1]
    assert not bench.spans()
    assert not bench.stamps.read_steps
    Event.device_is_done.set()
    assert eventually(lambda: len(bench.spans()) == 3 * LAYERS + 1)
    (step,) = [span for span in bench.spans() if span.name == STEP_SPAN]
    told = dict(step.attributes)
    assert (told["dsa.placement"], told["dsa.bank"], told["dsa.bank_generation"]) == ("mps", 1, 3)
    clock, _ = step.events
    assert clock.attributes == {"dsa.clock_error_ns": 1500}
    assert all(event.timestamp <= step.end_time for event in step.events)


def test_an_inline_step_has_a_span_and_no_stages(made: Any) -> None:
    bench = made()
    bench.step(attached=False)
    bench.device.close()
    (step,) = bench.spans()
    assert dict(step.attributes)["dsa.placement"] == "inline"
    assert not bench.stamps.read_steps


def test_stamps_are_read_of_kept_steps_only(made: Any) -> None:
    bench = made(ratio=0.0)
    Event.device_is_done.set()
    for _ in range(5):
        bench.step()
    bench.traces.found(Finding(FindingKind.BAD_PAGE, 2, 7, None, None, None, None, "", ""))
    bench.bells.wanted.add(3)
    bench.step()
    bench.device.close()
    assert bench.stamps.read_steps == [2, 3]
    assert {span.attributes["dsa.step"] for span in bench.spans()} == {2, 3}
    assert bench.bells.kept == [2, 3]


def test_undecided_steps_are_dropped_while_their_stamps_are_still_there(made: Any) -> None:
    bench = made(ratio=0.0)
    Event.device_is_done.set()
    for _ in range(HELD_STEPS + 5):
        bench.step()
    bench.device.close()
    bench.traces.settle()
    assert bench.traces.dropped == 5
    bench.bells.wanted.add(1)
    bench.traces.settle()
    assert not bench.spans()


def test_one_step_of_sixteen_is_timed_and_no_inline_one(made: Any) -> None:
    bench = made(ratio=0.0)
    Event.device_is_done.set()
    for number in range(1, 65):
        bench.step(attached=number != 32)
    bench.device.close()
    assert bench.stamps.read_steps == [16, 48, 64]
    assert bench.timed_steps() == 3
