"""Metrics: what is emitted is what the docs' table says, and means what it says."""

import re
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as otlp
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as otlp_rpc
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, Session, Source
from indexer_client.metrics import start_metrics
from indexer_service.errors import StartError
from indexer_service.events import FinishedStep
from indexer_service.metrics import StepMetrics
from indexer_service.server import run
from indexer_service.settings import Settings
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.telemetry import metrics as otel_metrics
from ipc_handoff.telemetry.catalogue import METRICS, Kind
from ipc_handoff.telemetry.metrics import Metrics, start
from ipc_handoff.telemetry.prometheus import PrometheusText
from ipc_handoff.telemetry.settings import MetricSettings
from tests.support.plants import Pair, pair, patient_client
from tests.support.processes import ServiceProcess
from tests.support.traces import Traced, attended_step, traced
from tests.support.waiting import SOON, eventually
from tests.support.workloads import RandomSteps, Shape

SMALL = Shape(layers=(1, 2), requests=1)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


class Told:
    """What a side's metrics say now."""

    def __init__(self, name: str) -> None:
        self._reader = InMemoryMetricReader()
        self.metrics = Metrics(MetricSettings(name), [self._reader])

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        found: dict[str, list[Any]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                found |= {metric.name: list(metric.data.data_points) for metric in scope.metrics}
        return found

    def values(self, name: str) -> dict[str, float]:
        """By label."""
        found = {}
        for point in self.points().get(name, []):
            (label,) = point.attributes.values() or ("",)
            found[str(label)] = getattr(point, "value", None) or getattr(point, "count", 0)
        return found


@contextmanager
def measured(folder: Path, **fields: Any) -> Iterator[tuple[Pair, Traced, Told, Told]]:
    """A traced pair whose two sides have metrics."""
    worker, service = Told("worker"), Told("service")
    step_metrics = StepMetrics(service.metrics)
    with traced(folder, metrics=worker.metrics, step_metrics=step_metrics, **fields) as made:
        step_metrics.observe_traces(made[1].telemetry)
        yield *made, worker, service


def a_finding(running: Pair, kind: FindingKind = FindingKind.BAD_PAGE) -> Finding:
    epoch = running.session.epoch or 0
    return Finding(kind, running.session._steps, epoch, None, None, None, None, "1", "2")


def test_counters_count_what_happened(tmp_path: Path) -> None:
    with measured(tmp_path, shape=SMALL) as (running, both, worker, service):
        for _ in range(5):
            attended_step(running)
        assert worker.values("dsa_indexer_layers") == {"service": 10, "inline": 0}
        assert eventually(lambda: service.values("dsa_indexer_steps") == {"answered": 5})
        assert service.values("dsa_indexer_sessions") == {"": 1}
        assert service.values("dsa_indexer_regions") == {"": 3 + len(SMALL.layers)}
        mapped = service.values("dsa_indexer_mapped")[""]
        assert mapped > SMALL.geometry.control.size
        running.session.found(a_finding(running))
        both.telemetry.found(a_finding(running))
        with running.stalled():
            assert Source.INLINE in running.step()
        running.session.wait_attached(SOON)
        running.step()
        assert worker.values("dsa_indexer_layers") == {"service": 12, "inline": 2}
        assert worker.values("dsa_indexer_attachments") == {"": 2}
        assert worker.values("dsa_indexer_reattachments") == {"": 1}
        assert worker.values("dsa_indexer_detachments") == {"": 1}
        assert worker.values("dsa_indexer_findings") == {"bad_page": 1, "wait_ended": 1}
        steps = {"answered": 6, "cancelled": 1}
        assert eventually(lambda: service.values("dsa_indexer_steps") == steps)
        assert worker.values("dsa_indexer_traces") == {"kept": 7, "dropped": 0}
        assert eventually(lambda: service.values("dsa_indexer_traces")["kept"] == 6)
        assert worker.values("dsa_indexer_lost_stamps") == {"worker": 0}


def test_a_step_without_times_has_lost_none(tmp_path: Path) -> None:
    service = Told("service")
    metrics = StepMetrics(service.metrics)
    plan = pb.StepPlan(step=9, trace=pb.TraceContext(trace_id=b"1" * 16))
    report = pb.StepReport(step=9, status=pb.STEP_STATUS_CANCELLED)
    metrics.step_finished(FinishedStep(plan, report, (), []))
    assert service.values("dsa_indexer_steps") == {"cancelled": 1}
    assert "dsa_indexer_lost_stamps" not in service.points()
    metrics.step_finished(FinishedStep(plan, report, None, []))
    assert service.values("dsa_indexer_lost_stamps") == {"service": 1}


def test_a_finding_in_the_service_is_counted_by_kind() -> None:
    told = Told("service")
    metrics = StepMetrics(told.metrics)
    for kind in (FindingKind.BAD_PAGE, FindingKind.NAN_SCORES, FindingKind.BAD_PAGE):
        metrics.found(Finding(kind, 1, 1, None, None, None, None, "", ""))
    assert told.values("dsa_indexer_findings") == {"bad_page": 2, "nan_scores": 1}


def test_a_plan_of_an_old_epoch_is_counted(tmp_path: Path) -> None:
    with measured(tmp_path, shape=SMALL) as (running, _, _, service):
        attended_step(running)
        attachment = running.session._attachment
        assert attachment is not None
        assert service.values("dsa_indexer_stale_epochs") == {"": 0}
        plan = running.case().inputs.plan(9, attachment.epoch - 1, SMALL.layers)
        attachment.bank.control.plans.post(plan.SerializeToString())
        attachment.wake_service.ring()
        assert eventually(lambda: service.values("dsa_indexer_stale_epochs") == {"": 1})
        with pytest.raises(Exception, match="epoch"):
            attachment.control_plane.keep_alive(
                pb.KeepAliveRequest(session_id=attachment.session_id, epoch=attachment.epoch - 1)
            )
        assert service.values("dsa_indexer_stale_epochs") == {"": 2}
        assert eventually(lambda: service.values("dsa_indexer_steps").get("rejected") == 1)


def test_stages_are_timed_on_both_sides_one_layer_a_step(tmp_path: Path) -> None:
    steps = 6
    with measured(tmp_path, shape=SMALL) as (running, _, worker, service):
        for _ in range(steps):
            attended_step(running)
        of_worker = {"dsa.stage": steps, "dsa.handback": steps, "dsa.attend": steps}
        assert worker.values("dsa_indexer_stage") == of_worker
        of_service = dict.fromkeys(("dsa.gate", "dsa.logits", "dsa.topk", "dsa.answer"), steps)
        assert eventually(lambda: service.values("dsa_indexer_stage") == of_service)
        assert worker.values("dsa_indexer_step") == {"worker": steps}
        (step,) = worker.points()["dsa_indexer_step"]
        assert 1e-5 < step.min <= step.max < 10


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_exemplars_lead_to_traces_that_are_kept_and_to_no_other(
    ratio: float, tmp_path: Path
) -> None:
    with measured(tmp_path, ratio=ratio, shape=SMALL) as (running, _, worker, service):
        traces = {int(attended_step(running), 16) for _ in range(4)}
        found: dict[Told, set[int]] = {worker: set(), service: set()}

        def collected(told: Told) -> float:
            """Values so far; exemplars are told once."""
            points = told.points().get("dsa_indexer_stage", [])
            found[told] |= {lead.trace_id for point in points for lead in point.exemplars}
            return sum(point.count for point in points)

        assert eventually(lambda: collected(worker) == 12)
        assert eventually(lambda: collected(service) == 16)
        for leads in found.values():
            assert leads <= traces
            assert bool(leads) is (ratio == 1.0)


def test_metrics_need_no_tracing(tmp_path: Path) -> None:
    told = Told("worker")
    with pair(tmp_path, shape=SMALL, metrics=told.metrics) as running:
        for _ in range(3):
            running.step()
        assert told.values("dsa_indexer_step") == {"worker": 3}
        assert "dsa_indexer_traces" not in told.points()


def test_without_a_wish_metrics_are_off() -> None:
    assert start(MetricSettings("x")) is None


def test_an_otlp_endpoint_gets_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    class Receiver(otlp_rpc.MetricsServiceServicer):
        def __init__(self) -> None:
            self.names: dict[str, set[str]] = defaultdict(set)

        def Export(
            self, request: otlp.ExportMetricsServiceRequest, context: grpc.ServicerContext
        ) -> otlp.ExportMetricsServiceResponse:
            for resource in request.resource_metrics:
                of = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_metrics:
                    self.names[of["service.name"]] |= {metric.name for metric in scope.metrics}
            return otlp.ExportMetricsServiceResponse()

    server, receiver = grpc.server(futures.ThreadPoolExecutor(2)), Receiver()
    otlp_rpc.add_MetricsServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    metrics = start(MetricSettings("ours"))
    assert metrics is not None and metrics.port is None
    StepMetrics(metrics).found(Finding(FindingKind.BAD_SLOT, 1, 1, None, None, None, None, "", ""))
    metrics.close()
    server.stop(None)
    assert receiver.names == {"ours": {"dsa_indexer_findings"}}


class Late(InMemoryMetricReader):
    """A reader that a collector has kept for too long."""

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        raise RuntimeError("deadline exceeded")


def test_metrics_that_nobody_takes_are_logged_and_the_port_is_free_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    text = PrometheusText("127.0.0.1", 0)
    Metrics(MetricSettings("x", port=0), [Late(), text.reader], text).close()
    assert "deadline exceeded" in caplog.text
    PrometheusText("127.0.0.1", text.port).close()


def test_a_port_that_is_taken_leaves_no_reader_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    begun: list[str] = []
    monkeypatch.setattr(otel_metrics, "PeriodicExportingMetricReader", begun.append)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    holder = PrometheusText("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        start(MetricSettings("x", port=holder.port))
    assert not begun
    holder.close()


def _scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON) as answer:
        return str(answer.read().decode())


def test_prometheus_reads_text_from_a_port_of_the_service(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    port = _free_port()
    service = ServiceProcess(tmp_path / "d" / "i.sock", metrics_port=port, gate_bound_seconds=SOON)
    steps = RandomSteps(SMALL, 1)
    try:
        settings = patient_client(f"unix:{tmp_path}/d/i.sock", worker_metrics_port=0)
        with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
            session.wait_attached(SOON)
            for number in range(3):
                case = steps.case(number)
                with session.step(case.inputs, case.layers) as step:
                    for layer, query in case.queries.items():
                        out = case.expected[layer].clone()
                        step.select(layer, query.q, query.weights, out=out)
            assert eventually(
                lambda: 'dsa_indexer_steps_total{status="answered"} 3.0' in _scraped(port)
            )
            text = _scraped(port)
            assert "dsa_indexer_sessions 1.0" in text
            assert 'dsa_indexer_stage_seconds_bucket{le="+Inf",stage="dsa.topk"} 3.0' in text
            assert session._metrics is not None
            own = session._metrics._metrics.port
            assert own is not None
            assert 'dsa_indexer_layers_total{source="service"} 6.0' in _scraped(own)
    finally:
        service.kill()


def _free_port() -> int:
    metrics = start(MetricSettings("x", port=0))
    assert metrics is not None and metrics.port
    port = metrics.port
    metrics.close()
    return port


def test_a_port_that_is_taken_stops_a_service_and_no_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    holder = start(MetricSettings("x", port=0))
    assert holder is not None and holder.port
    with pytest.raises(StartError, match=rf"metrics_port: 127\.0\.0\.1:{holder.port}: .*\(fix: "):
        run(Settings(address=f"unix:{tmp_path}/d/i.sock", metrics_port=holder.port))
    assert start_metrics(ClientSettings(worker_metrics_port=holder.port)) is None
    assert "worker_metrics_port" in caplog.text
    holder.close()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(StartError, match=r"pip install 'dsa-indexer\[prometheus\]'"):
        run(Settings(address=f"unix:{tmp_path}/d/i.sock", metrics_port=0))


def test_an_exporter_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "statsd")
    with pytest.raises(ValueError, match=r"OTEL_METRICS_EXPORTER: 'statsd' is not here \(fix: "):
        start(MetricSettings("x"))


def test_every_metric_is_emitted_and_no_other(tmp_path: Path) -> None:
    """A pair in which everything happens that is counted."""
    with measured(tmp_path, shape=SMALL) as (running, _, worker, service):
        attended_step(running)
        running.session.found(a_finding(running))
        metrics = StepMetrics(service.metrics)
        metrics.found(a_finding(running))
        plan = pb.StepPlan(step=9, trace=pb.TraceContext(trace_id=b"1" * 16))
        metrics.step_finished(FinishedStep(plan, pb.StepReport(step=9, fault_count=2), None, []))
        assert eventually(lambda: service.values("dsa_indexer_stage"))
        for side, told in (("worker", worker), ("service", service)):
            expected = {metric.name for metric in METRICS if side in metric.sides}
            assert set(told.points()) == expected, side
            for metric in METRICS:
                for point in told.points().get(metric.name, []):
                    labels = [metric.label] if metric.label else []
                    assert list(point.attributes) == labels, metric.name


def test_names_begin_with_the_projects_and_counters_never_go_down() -> None:
    assert all(metric.name.startswith("dsa_indexer_") for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_docs_table_is_the_catalogue(repository: Path) -> None:
    text = (repository / "docs" / "tracing.md").read_text()
    cell = r" \| (.*?)"
    rows = re.findall(rf"^\| `(dsa_indexer_\w+)` \| (\w+){3 * cell} \|$", text, re.MULTILINE)
    assert rows == [
        (
            metric.prometheus_name,
            metric.kind.value,
            f"`{metric.label}`" if metric.label else "",
            ", ".join(metric.sides),
            metric.meaning,
        )
        for metric in METRICS
    ]
    assert {metric.kind for metric in METRICS} == set(Kind)
