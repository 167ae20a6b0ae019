"""OpenTelemetry, reached from here only.

Both sides turn their stage stamps into spans of one trace a step, after the step, off the hot
path. Standard `OTEL_*` variables choose OTLP; otherwise a file of JSON lines or the console.
With nothing chosen `start` returns None, and callers do nothing but test for it.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.stages import STEP_SPAN, StageSpan

Times = Sequence[Sequence[int]]
Attributes = Mapping[str, str | int | bool | float]

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_QUEUED_SPANS = 65536
_LOOKS = 3


@dataclass(frozen=True)
class TraceSettings:
    """Where spans go.

    Attributes:
        ratio: share of steps that a worker traces.
        export_seconds: how often they leave without `Tracing.flush`.
    """

    service_name: str
    file: Path | None = None
    console: bool = False
    ratio: float = 1.0
    export_seconds: float = 1.0


def start(settings: TraceSettings) -> "Tracing | None":
    """Tracing as the settings and the `OTEL_*` variables want it; None: off.

    Raises:
        OSError: the file cannot be written.
        ValueError: a variable asks for an exporter that is not here; names it and the fix.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    wanted = _wanted_exporters()
    exporters: list[SpanExporter] = []
    if "otlp" in wanted:
        exporters.append(_otlp_exporter())
    if settings.file is not None:
        # One line a write, appended: both processes may share the file.
        lines = settings.file.open("a", buffering=1)
        exporters.append(ConsoleSpanExporter(out=lines, formatter=_json_line))
    if settings.console or "console" in wanted:
        exporters.append(ConsoleSpanExporter(out=sys.stdout))
    return Tracing(settings, exporters) if exporters else None


def _wanted_exporters() -> set[str]:
    """What `OTEL_TRACES_EXPORTER` names; without it OTLP, if an endpoint is given."""
    named = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if not named:
        return {"otlp"} if any(os.environ.get(name) for name in _OTLP_VARIABLES) else set()
    wanted = {name.strip() for name in named.split(",")} - {"none"}
    if unknown := wanted - {"otlp", "console"}:
        raise ValueError(
            f"OTEL_TRACES_EXPORTER: {min(unknown)!r} is not here (fix: otlp, console or none)"
        )
    return wanted


def _otlp_exporter() -> SpanExporter:
    protocol = next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), "grpc")
    if protocol != "grpc":
        raise ValueError(
            f"{_PROTOCOL_VARIABLES[1]}: {protocol!r} is not here (fix: grpc, which collectors take "
            "at port 4317)"
        )
    # Imported here: its stubs need a protobuf of their own time.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _json_line(span: ReadableSpan) -> str:
    # The SDK's own text is cut to microseconds, and a stage may be shorter than one.
    exact = f'"start_time_unix_nano": {span.start_time}, "end_time_unix_nano": {span.end_time}'
    return f"{span.to_json(indent=None)[:-1]}, {exact}}}\n"


class Tracing:
    """A tracer of our own: the host's global provider is left alone.

    Args:
        exporters: where spans go.
    """

    def __init__(self, settings: TraceSettings, exporters: Iterable[SpanExporter]) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME") or settings.service_name
        sampler = ParentBased(TraceIdRatioBased(settings.ratio))
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name, "process.pid": os.getpid()}),
            # Without one of ours the SDK takes the one that the variables name.
            sampler=None if os.environ.get("OTEL_TRACES_SAMPLER") else sampler,
            shutdown_on_exit=False,
        )
        for exporter in exporters:
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    exporter,
                    max_queue_size=_QUEUED_SPANS,
                    schedule_delay_millis=settings.export_seconds * 1000,
                )
            )
        self._tracer = self._provider.get_tracer("dsa-indexer")
        self._closed = threading.Event()

    def begin_step(self, attributes: Attributes) -> "StepTrace | None":
        """The worker's span of a step; None if this step is not sampled."""
        offset = _wall_offset()
        begin = offset + time.monotonic_ns()
        span = self._tracer.start_span(STEP_SPAN, attributes=attributes, start_time=begin)
        return StepTrace(self, span, offset) if span.is_recording() else None

    def stage_spans(
        self,
        parent: otel_context.Context,
        spans: Sequence[StageSpan],
        times: Times,
        layers: Sequence[int],
        attributes: Attributes,
        *,
        offset: int,
        incomplete: bool = False,
    ) -> None:
        """Spans of every stage that has begun, from one side's stamps of a step.

        Args:
            times: [layer ordinal][stage] monotonic ns; 0: not reached.
            offset: wall time minus monotonic time, ns.
            incomplete: they are exported in the place of a side that cannot any more.
        """
        for layer, stamps in zip(layers, times, strict=True):
            for stage in spans:
                if not stamps[stage.begin]:
                    continue
                own: dict[str, str | int | bool | float] = {**attributes, "dsa.layer": layer}
                if incomplete:
                    own["dsa.incomplete"] = True
                begin = offset + stamps[stage.begin]
                span = self._tracer.start_span(stage.name, parent, attributes=own, start_time=begin)
                if not stamps[stage.end]:
                    span.set_status(Status(StatusCode.ERROR, "never ended"))
                span.end(offset + (stamps[stage.end] or time.monotonic_ns()))

    def service_stages(
        self,
        plan: pb.StepPlan,
        spans: Sequence[StageSpan],
        times: Times,
        layers: Sequence[int],
        attributes: Attributes,
    ) -> None:
        """As `stage_spans`, under the step span that the plan names."""
        remote = SpanContext(
            int.from_bytes(plan.trace.trace_id, "big"),
            int.from_bytes(plan.trace.span_id, "big"),
            is_remote=True,
            trace_flags=trace.TraceFlags(plan.trace.flags),
        )
        parent = trace.set_span_in_context(NonRecordingSpan(remote), otel_context.Context())
        self.stage_spans(parent, spans, times, layers, attributes, offset=_wall_offset())

    @contextmanager
    def client_call(self, method: str) -> Iterator[list[tuple[str, str]]]:
        """Span around an rpc; yields the metadata that carries its context."""
        with self._tracer.start_as_current_span(method, kind=SpanKind.CLIENT):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            yield list(carrier.items())

    @contextmanager
    def server_call(self, method: str, metadata: Mapping[str, str]) -> Iterator[None]:
        """Span around the handling of an rpc, child of the caller's."""
        parent = propagate.extract(metadata)
        with self._tracer.start_as_current_span(method, parent, kind=SpanKind.SERVER):
            yield

    def flush(self) -> bool:
        """Export what is queued now; whether all of it left in time."""
        return self._provider.force_flush()

    def wait_closed(self, seconds: float) -> bool:
        """Sleep, but not over the end; whether it has come."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        """Export what is queued, then stop."""
        self._closed.set()
        self._provider.shutdown()


def _wall_offset() -> int:
    """Wall time minus monotonic time, ns: stamps are the one, spans the other.

    Looked at anew for each step, since wall time may be set. The closest look counts.
    """
    looks = []
    for _ in range(_LOOKS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]


class StepTrace:
    """The worker's part of one step's trace; all of its times are told by one clock.

    Args:
        offset: wall time minus monotonic time, ns.
    """

    def __init__(self, tracing: Tracing, span: Span, offset: int) -> None:
        self._tracing = tracing
        self._span = span
        self._offset = offset
        context = span.get_span_context()
        self.context = pb.TraceContext(
            trace_id=context.trace_id.to_bytes(16, "big"),
            span_id=context.span_id.to_bytes(8, "big"),
            flags=int(context.trace_flags),
        )

    @property
    def trace_id(self) -> str:
        return self.context.trace_id.hex()

    def stages(
        self,
        spans: Sequence[StageSpan],
        times: Times,
        layers: Sequence[int],
        attributes: Attributes,
        *,
        incomplete: bool = False,
    ) -> None:
        """See `Tracing.stage_spans`. Also after `end`."""
        self._tracing.stage_spans(
            trace.set_span_in_context(self._span),
            spans,
            times,
            layers,
            attributes,
            offset=self._offset,
            incomplete=incomplete,
        )

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes, self._now())

    def end(self, error: BaseException | None = None) -> None:
        now = self._now()
        if error is not None:
            self._span.record_exception(error, timestamp=now)
            self._span.set_status(Status(StatusCode.ERROR, repr(error)))
        self._span.end(now)

    def _now(self) -> int:
        return self._offset + time.monotonic_ns()
