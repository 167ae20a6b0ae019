"""Whether spans arrived: the SDK flushes, and does not say."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class NotedExporter(SpanExporter):
    """Another exporter whose failures are counted.

    Attributes:
        failures: exports that did not arrive, so far.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.failures = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self.failures += result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
