"""What a GPU stamped, on the host's clock: the two drift apart, and how far is never older than a
second.
"""

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytest.importorskip("triton", reason="Triton exists on Linux only")

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.device_step import StageTimes
from indexer_service.events import FinishedStep
from indexer_service.telemetry import StepTelemetry
from ipc_handoff.kernels import clock
from ipc_handoff.kernels.clock import ClockOffset
from ipc_handoff.stages import SERVICE_SPANS, SERVICE_STAGES
from ipc_handoff.stamps import StepTimes
from ipc_handoff.telemetry.settings import TraceSettings
from ipc_handoff.telemetry.tracing import Tracing

STAGES = len(SERVICE_STAGES)


class Clocks:
    """The host's, and a GPU's whose offset grows by 5 ns at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks = 100.0, 0
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: self.now))

    def look(self) -> ClockOffset:
        self.looks += 1
        return ClockOffset(1000 + 5 * self.looks, 40 + self.looks)


def test_the_clock_is_looked_at_again_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    times = StageTimes(clocks.look, 1)
    found = []
    for step, clocks.now in ((1, 100.9), (2, 101.0), (3, 101.9), (4, 102.1)):
        told = times.of(step, [step, 7, *[0] * (STAGES - 1)])
        assert told is not None
        assert told[0][1:] == [0] * (STAGES - 1)  # not reached: no clock makes it a time
        found.append((told[0][0], told.clock_error))
    assert found == [(1012, 41), (1017, 42), (1017, 42), (1022, 43)]


def test_lost_stamps_cost_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    times = StageTimes(clocks.look, 1)
    clocks.now += 5
    assert times.of(3, [4, *[9] * STAGES]) is None
    assert (times.lost, clocks.looks) == (1, 1)


@pytest.mark.parametrize("error", [None, 43])
def test_spans_say_how_wrong_the_clock_may_be(error: int | None) -> None:
    exporter = InMemorySpanExporter()
    telemetry = StepTelemetry(tracing := Tracing(TraceSettings("service"), [exporter]))
    control = SimpleNamespace(
        bells=SimpleNamespace(exported=lambda step: None, is_detached=lambda: False)
    )
    telemetry.attached(SimpleNamespace(epoch=5, control=control, engine="cpu", placement="cpu"))  # type: ignore[arg-type]
    trace = pb.TraceContext(trace_id=b"1" * 16, span_id=b"2" * 8, flags=1)
    plan = pb.StepPlan(step=3, epoch=5, trace=trace)
    times = StepTimes([[1] * STAGES], error)
    telemetry.step_finished(FinishedStep(plan, pb.StepReport(epoch=5), times, [0]))
    tracing.close()
    for span in exporter.get_finished_spans():
        assert (span.attributes or {}).get("dsa.clock_error_ns") == error
    assert len(exporter.get_finished_spans()) == len(SERVICE_SPANS)
