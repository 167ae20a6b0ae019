"""Where metrics go: OTLP, text for Prometheus, nowhere; and what stands in the way."""

import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from indexer_client import ClientSettings, Session
from indexer_client.metrics import start_metrics
from indexer_service.errors import StartError
from indexer_service.metrics import StepMetrics
from indexer_service.serving import run
from indexer_service.settings import Settings
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.telemetry import metrics as otel_metrics
from ipc_handoff.telemetry.metrics import Metrics, start
from ipc_handoff.telemetry.prometheus import PrometheusText
from ipc_handoff.telemetry.settings import MetricSettings
from tests.support.loopback import free_port, metrics_text
from tests.support.otlp import Receiver
from tests.support.plants import patient_client
from tests.support.processes import ServiceProcess
from tests.support.waiting import SOON, eventually
from tests.support.workloads import RandomSteps, Shape

SMALL = Shape(layers=(1, 2), requests=1)


def test_without_a_wish_metrics_are_off() -> None:
    assert start(MetricSettings("x")) is None


def test_an_otlp_endpoint_gets_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
    metrics = start(MetricSettings("ours"))
    assert metrics is not None and metrics.port is None
    StepMetrics(metrics).found(Finding(FindingKind.BAD_SLOT, 1, 1, None, None, None, None, "", ""))
    metrics.close()
    receiver.close()
    told = list(receiver.metrics())
    assert {process["service.name"] for process, _ in told} == {"ours"}
    assert "dsa_indexer_findings" in {metric.name for _, metric in told}


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


def test_prometheus_reads_text_from_a_port_of_the_service(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    port = free_port()
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
                lambda: 'dsa_indexer_steps_total{status="answered"} 3.0' in metrics_text(port)
            )
            text = metrics_text(port)
            assert "dsa_indexer_sessions 1.0" in text
            assert 'dsa_indexer_stage_seconds_bucket{le="+Inf",stage="dsa.topk"} 3.0' in text
            assert session._metrics is not None
            own = session._metrics._metrics.port
            assert own is not None
            assert 'dsa_indexer_layers_total{source="service"} 6.0' in metrics_text(own)
    finally:
        service.kill()


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
