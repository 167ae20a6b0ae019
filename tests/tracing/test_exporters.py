"""Where spans go: what the settings and the standard `OTEL_*` variables choose."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import gethostname

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from indexer_service.errors import StartError
from indexer_service.serving import run
from indexer_service.settings import Settings
from ipc_handoff.telemetry import environment
from ipc_handoff.telemetry.tracing import TraceSettings, Tracing, start
from tests.support.otlp import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def step_of(tracing: Tracing | None) -> str:
    """Trace one step and export it; its trace id."""
    assert tracing is not None
    trace_id = exported_step(tracing)
    tracing.close()
    return trace_id


def exported_step(tracing: Tracing) -> str:
    trace = tracing.begin_step({"dsa.step": 1})
    trace.end()
    trace.export()
    return trace.trace_id


def test_without_a_wish_tracing_is_off() -> None:
    assert start(TraceSettings("x")) is None


@pytest.mark.parametrize("exporter", [None, "otlp"])
def test_an_otlp_endpoint_gets_the_spans(
    exporter: str | None, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
    if exporter is not None:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    trace_id = step_of(start(TraceSettings("ours")))
    told = [(process["service.name"], s.name, s.trace_id) for process, s in receiver.spans()]
    assert told == [("ours", "dsa.step", bytes.fromhex(trace_id))]


def test_the_service_name_of_the_environment_wins(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "node7")
    step_of(start(TraceSettings("ours")))
    ((process, _),) = receiver.spans()
    assert process["service.name"] == "node7"


def test_every_process_is_an_instance_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was forked when the SDK had been imported."""
    assert _instance() == f"{gethostname()}:{os.getpid()}"
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert _instance() == f"{gethostname()}:4711"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=rank3")
    assert _instance() == "rank3"


def _instance() -> str:
    return str(environment.resource("x").attributes["service.instance.id"])


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_SDK_DISABLED", "true")]
)
def test_tracing_can_be_switched_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    assert start(TraceSettings("x")) is None


def test_the_console_by_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    trace_id = step_of(start(TraceSettings("x")))
    assert trace_id in capsys.readouterr().out


def test_a_file_gets_one_json_object_a_line(tmp_path: Path) -> None:
    ids = [step_of(start(TraceSettings("x", file=tmp_path / "t"))) for _ in range(2)]
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [line["context"]["trace_id"] for line in lines] == [f"0x{trace}" for trace in ids]


@pytest.mark.parametrize(
    ("ratio", "sampler", "sampled"),
    [(1.0, None, True), (0.0, None, False), (0.0, "always_on", True), (1.0, "always_off", False)],
)
def test_the_ratio_samples_unless_a_variable_names_a_sampler(
    ratio: float,
    sampler: str | None,
    sampled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    tracing = start(TraceSettings("x", file=tmp_path / "t", ratio=ratio))
    assert tracing is not None
    assert tracing.begin_step({}).is_kept is sampled
    tracing.close()


@pytest.mark.parametrize("how", ["says so", "raises"])
def test_a_flush_says_whether_spans_have_arrived(how: str) -> None:
    class Collector(InMemorySpanExporter):
        is_there = True

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if not self.is_there and how == "raises":
                raise OSError("no space left")
            return super().export(spans) if self.is_there else SpanExportResult.FAILURE

    tracing = Tracing(TraceSettings("x"), [collector := Collector()])
    told = []
    for collector.is_there in (True, False, True):
        exported_step(tracing)
        told.append(tracing.flush())
    tracing.close()
    assert told == [True, False, True]
    assert len(collector.get_finished_spans()) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
    ],
)
def test_an_exporter_that_is_not_here_is_named_and_stops_the_service(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"^{name}: '{value}' is not here \(fix: "):
        start(TraceSettings("x"))
    with pytest.raises(StartError, match=name):
        run(Settings(address=f"unix:{tmp_path}/d/i.sock"))
