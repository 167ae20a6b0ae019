"""A pair whose both sides trace into this process's memory."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from indexer_service.telemetry import StepTelemetry
from ipc_handoff.stages import STEP_SPAN
from ipc_handoff.telemetry.tracing import TraceSettings, Tracing
from tests.support.plants import Pair, pair


class OpenSpans(SpanProcessor):
    """Counts starts against ends: exporters never hear of a span that does not end."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self.names[span.name] += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.names[span.name] -= 1

    def assert_none(self) -> None:
        left = {name: count for name, count in self.names.items() if count}
        assert not left, f"spans that never ended: {left}"


class Traced:
    """What both sides exported, once the pair has ended."""

    def __init__(self, ratio: float, slow: Mapping[str, float]) -> None:
        self._exporters = {side: InMemorySpanExporter() for side in ("worker", "service")}
        self.tracings = {
            side: Tracing(TraceSettings(side, ratio=ratio, slow_seconds=slow.get(side)), [exporter])
            for side, exporter in self._exporters.items()
        }
        self.telemetry = StepTelemetry(self.tracings["service"])
        self.open = OpenSpans()
        for tracing in self.tracings.values():
            tracing._provider.add_span_processor(self.open)

    def spans(self, side: str) -> list[ReadableSpan]:
        """Step and stage spans; calls of the control plane are another trace each."""
        found = self._exporters[side].get_finished_spans()
        return [span for span in found if span.name.startswith("dsa.")]

    def stages(self, side: str) -> Counter[str]:
        return Counter(span.name for span in self.spans(side))

    def by_step(self) -> dict[int, list[ReadableSpan]]:
        """Spans of both sides."""
        found = defaultdict(list)
        for side in ("worker", "service"):
            for span in self.spans(side):
                assert span.attributes is not None
                found[int(str(span.attributes["dsa.step"]))].append(span)
        return dict(found)


@contextmanager
def traced(
    folder: Path, *, ratio: float = 1.0, slow: Mapping[str, float] | None = None, **fields: Any
) -> Iterator[tuple[Pair, Traced]]:
    """A pair, and its spans; at the end every span has ended.

    Args:
        slow: by side, seconds after which it keeps a step.
    """
    both = Traced(ratio, slow or {})
    with pair(
        folder,
        tracing=both.tracings["worker"],
        observer=both.telemetry,
        **fields,
    ) as running:
        yield running, both
    both.tracings["service"].close()
    both.open.assert_none()


def attended_step(running: Pair) -> str:
    """A step whose attention is stamped too; its trace's id."""
    case = running.case()
    running.checker.sources.append([])
    with running.session.step(case.inputs, case.layers) as step:
        for layer in case.layers:
            source, out = running.ask(step, case, layer)
            running.checker.check(step.number, layer, out, case, source)
            with step.attending(layer):
                pass
    return step.trace_id


def assert_whole(spans: list[ReadableSpan]) -> ReadableSpan:
    """One trace, every span inside of it, and under the step; the step's span."""
    assert len({span.context.trace_id for span in spans}) == 1
    (step,) = [span for span in spans if span.name == STEP_SPAN]
    assert step.parent is None
    assert step.start_time and step.end_time
    for span in spans:
        assert span.start_time and span.end_time
        assert span.end_time >= span.start_time
        if span is not step:
            assert span.parent is not None
            assert span.parent.span_id == step.context.span_id
    return step
