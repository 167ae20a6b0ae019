"""Traces: spans made from the stage stamps of both sides, one trace a step.

Whether a step's trace is kept is decided when the step is over, by either side. Until then a
step has ids and stamps, and costs nothing more. Standard `OTEL_*` variables choose OTLP;
otherwise a file of JSON lines or the console. With nothing chosen `start` returns None, and
callers do nothing but test for it.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.findings import Finding
from ipc_handoff.stages import FINDING_EVENT, STEP_SPAN, StageSpan
from ipc_handoff.telemetry.attributes import Attributes, Times, Value, finding_attributes
from ipc_handoff.telemetry.environment import (
    CONSOLE,
    OTLP,
    check_protocol,
    is_disabled,
    resource,
    wanted_exporters,
)
from ipc_handoff.telemetry.exports import NotedExporter
from ipc_handoff.telemetry.settings import TraceSettings
from ipc_handoff.telemetry.step_spans import GivenIds, StepsAreDecided
from ipc_handoff.telemetry.step_trace import SAMPLED, StepTrace, wall_offset

_QUEUED_SPANS = 65536


def start(settings: TraceSettings) -> "Tracing | None":
    """Tracing as the settings and the `OTEL_*` variables want it; None: off.

    Raises:
        OSError: the file cannot be written.
        ValueError: a variable asks for an exporter that is not here; names it and the fix.
    """
    if is_disabled():
        return None
    wanted = wanted_exporters("TRACES", (OTLP, CONSOLE))
    exporters: list[SpanExporter] = []
    if OTLP in wanted:
        check_protocol("TRACES")
        # Imported here: its stubs need a protobuf of their own time.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporters.append(OTLPSpanExporter())
    if settings.file is not None:
        # One line a write, appended: both processes may share the file.
        lines = settings.file.open("a", buffering=1)
        exporters.append(ConsoleSpanExporter(out=lines, formatter=_json_line))
    if settings.console or CONSOLE in wanted:
        exporters.append(ConsoleSpanExporter(out=sys.stdout))
    return Tracing(settings, exporters) if exporters else None


def _json_line(span: ReadableSpan) -> str:
    # The SDK's own text is cut to microseconds, and a stage may be shorter than one.
    exact = f'"start_time_unix_nano": {span.start_time}, "end_time_unix_nano": {span.end_time}'
    return f"{span.to_json(indent=None)[:-1]}, {exact}}}\n"


class Tracing:
    """A tracer of our own: the host's global provider is left alone.

    Args:
        exporters: where spans go.

    Attributes:
        slow_seconds: a step that takes longer is kept; None: none is kept for that.
    """

    def __init__(self, settings: TraceSettings, exporters: Iterable[SpanExporter]) -> None:
        self.slow_seconds = settings.slow_seconds
        self._sampler = _sampler(settings.ratio)  # of steps
        self._ids = GivenIds()
        self._provider = TracerProvider(
            resource=resource(settings.service_name),
            sampler=StepsAreDecided(ParentBased(self._sampler)),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._exporters = [NotedExporter(exporter) for exporter in exporters]
        self._failures = 0
        for exporter in self._exporters:
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    exporter,
                    max_queue_size=_QUEUED_SPANS,
                    schedule_delay_millis=settings.export_seconds * 1000,
                )
            )
        self._tracer = self._provider.get_tracer("dsa-indexer")
        self._closed = threading.Event()

    def begin_step(self, attributes: Attributes) -> StepTrace:
        """The worker's part of a step that begins now; no span yet."""
        trace_id, span_id = self._ids.generate_trace_id(), self._ids.generate_span_id()
        chosen = self._sampler.should_sample(None, trace_id, STEP_SPAN, attributes=attributes)
        sampled = chosen.decision is Decision.RECORD_AND_SAMPLE
        context = pb.TraceContext(
            trace_id=trace_id.to_bytes(16, "big"),
            span_id=span_id.to_bytes(8, "big"),
            flags=SAMPLED if sampled else 0,
        )
        return StepTrace(self, context, attributes)

    def stage_spans(
        self,
        context: pb.TraceContext,
        spans: Sequence[StageSpan],
        times: Times,
        layers: Sequence[int],
        attributes: Attributes,
        *,
        offset: int | None = None,
        incomplete: bool = False,
        of_layers: Mapping[int, Attributes] | None = None,
        findings: Sequence[Finding] = (),
    ) -> list[Finding]:
        """Spans of every stage that has begun and was not left out, from one side's stamps.

        Args:
            context: of the step's span.
            times: [layer ordinal][stage] monotonic ns; 0: not reached.
            offset: wall time minus monotonic time, ns; as it is now by default.
            incomplete: they are exported in the place of a side that cannot any more.
            of_layers: more attributes of a layer's spans.
            findings: become events of the stages that they name.

        Returns:
            findings that name no stage that has begun.
        """
        parent, left = parent_of(context), list(findings)
        offset = wall_offset() if offset is None else offset
        for layer, stamps in zip(layers, times, strict=True):
            for stage in spans:
                if not stamps[stage.begin] or _was_left_out(stage, stamps):
                    continue
                own: dict[str, Value] = {
                    **attributes,
                    **(of_layers or {}).get(layer, {}),
                    "dsa.layer": layer,
                }
                if incomplete:
                    own["dsa.incomplete"] = True
                begin = offset + stamps[stage.begin]
                span = self._tracer.start_span(stage.name, parent, attributes=own, start_time=begin)
                end = offset + (stamps[stage.end] or time.monotonic_ns())
                here = [f for f in left if f.stage == stage.name and f.layer in (None, layer)]
                for finding in here:
                    left.remove(finding)
                    span.add_event(FINDING_EVENT, finding_attributes(finding), end)
                if not stamps[stage.end]:
                    span.set_status(Status(StatusCode.ERROR, "never ended"))
                span.end(end)
        return left

    def finding_span(
        self, context: pb.TraceContext, findings: Sequence[Finding], attributes: Attributes
    ) -> None:
        """A span for findings that belong to no stage, or were told when their step had left."""
        if not findings:
            return
        now = wall_offset() + time.monotonic_ns()
        span = self._tracer.start_span(
            FINDING_EVENT, parent_of(context), attributes=attributes, start_time=now
        )
        for finding in findings:
            span.add_event(FINDING_EVENT, finding_attributes(finding), now)
        span.end(now)

    def step_span(self, step: StepTrace) -> None:
        """The span of a step that is over."""
        context = step.context
        trace_id = int.from_bytes(context.trace_id, "big")
        with self._ids.given(trace_id, int.from_bytes(context.span_id, "big")):
            span = self._tracer.start_span(
                STEP_SPAN,
                otel_context.Context(),
                attributes=step.attributes,
                start_time=step.offset + step.began,
            )
        for name, attributes, at in step.events:
            span.add_event(name, attributes, step.offset + at)
        if step.error is not None:
            span.record_exception(step.error, timestamp=step.offset + step.ended)
            span.set_status(Status(StatusCode.ERROR, repr(step.error)))
        span.end(step.offset + step.ended)

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
        with self._tracer.start_as_current_span(method, parent, kind=SpanKind.SERVER) as span:
            try:
                yield
            except asyncio.CancelledError:
                # The SDK takes it for no error; for whoever called it is one.
                span.set_status(Status(StatusCode.ERROR, "cancelled"))
                raise

    def flush(self) -> bool:
        """Export what is queued now; whether all that was queued since the last time arrived."""
        in_time = self._provider.force_flush()
        before, self._failures = self._failures, sum(each.failures for each in self._exporters)
        return in_time and self._failures == before

    def wait_closed(self, seconds: float) -> bool:
        """Sleep, but not over the end; whether it has come."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        """Export what is queued, then stop."""
        self._closed.set()
        self._provider.shutdown()


def _was_left_out(stage: StageSpan, stamps: Sequence[int]) -> bool:
    """Its end has no time, and a later one has: of rows that get -1 nothing is scored, say."""
    return not stamps[stage.end] and any(stamps[stage.end :])


def parent_of(context: pb.TraceContext) -> otel_context.Context:
    """The context in which a step's span is the current one."""
    step = SpanContext(
        int.from_bytes(context.trace_id, "big"),
        int.from_bytes(context.span_id, "big"),
        is_remote=True,
        trace_flags=trace.TraceFlags(SAMPLED),
    )
    return trace.set_span_in_context(NonRecordingSpan(step), otel_context.Context())


def _sampler(ratio: float) -> Sampler:
    if os.environ.get("OTEL_TRACES_SAMPLER"):
        # The one that the variables name: only the SDK's own provider reads them.
        return TracerProvider(shutdown_on_exit=False).sampler
    return TraceIdRatioBased(ratio)
