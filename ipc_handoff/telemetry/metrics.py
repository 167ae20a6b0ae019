"""Metrics: over OTLP as the standard `OTEL_*` variables say, and as text for Prometheus.

With nothing chosen `start` returns None, and callers do nothing but test for it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.telemetry.catalogue import METRICS, Kind, Metric
from ipc_handoff.telemetry.environment import (
    CONSOLE,
    OTLP,
    check_protocol,
    is_disabled,
    resource,
    wanted_exporters,
)
from ipc_handoff.telemetry.prometheus import PrometheusText
from ipc_handoff.telemetry.settings import MetricSettings
from ipc_handoff.telemetry.step_trace import SAMPLED
from ipc_handoff.telemetry.tracing import parent_of

logger = logging.getLogger(__name__)

Observed = Iterable[tuple[float, str]]
"""Values, each with its label's value; "" where the metric has no label."""

# From a stage of a GPU to a wait that ran out.
_SECONDS = [
    factor * 10.0**exponent for exponent in range(-6, 1) for factor in (1, 2, 5)
]  # fmt: skip
_CLOSE_MILLISECONDS = 5000


def start(settings: MetricSettings) -> "Metrics | None":
    """Metrics as the settings and the `OTEL_*` variables want them; None: off.

    Raises:
        OSError: the port cannot be had.
        ValueError: an exporter that is not here is asked for; names what asks, and the fix.
    """
    if is_disabled():
        return None
    wanted = wanted_exporters("METRICS", (OTLP, CONSOLE))
    if OTLP in wanted:
        check_protocol("METRICS")
    # First: if there is no port nothing else has begun, and its reader's end takes no time from
    # others that wait for a collector.
    text = None if settings.port is None else PrometheusText(settings.host, settings.port)
    readers: list[MetricReader] = [] if text is None else [text.reader]
    if OTLP in wanted:
        # Imported here: its stubs need a protobuf of their own time.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    if CONSOLE in wanted:
        readers.append(PeriodicExportingMetricReader(ConsoleMetricExporter()))
    return Metrics(settings, readers, text) if readers else None


class Metrics:
    """A meter of our own: the host's global provider is left alone. From any thread.

    Args:
        readers: who collects.
        text: closed with this.
    """

    def __init__(
        self,
        settings: MetricSettings,
        readers: Sequence[MetricReader],
        text: PrometheusText | None = None,
    ) -> None:
        self._text = text
        self._provider = MeterProvider(
            readers, resource=resource(settings.service_name), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("dsa-indexer")
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in METRICS:
            about = {"unit": metric.unit, "description": metric.meaning}
            if metric.kind is Kind.HISTOGRAM:
                self._histograms[metric] = self._meter.create_histogram(
                    metric.name, explicit_bucket_boundaries_advisory=_SECONDS, **about
                )

    @property
    def port(self) -> int | None:
        """Where Prometheus reads; None: nowhere."""
        return None if self._text is None else self._text.port

    def count(self, metric: Metric, number: int = 1, label: str = "") -> None:
        """Add to a counter that was not given to `observe`."""
        counter = self._counters.get(metric)
        if counter is None:
            counter = self._counters[metric] = self._meter.create_counter(
                metric.name, unit=metric.unit, description=metric.meaning
            )
        counter.add(number, _attributes(metric, label))

    def record(
        self, metric: Metric, seconds: float, label: str, trace: pb.TraceContext | None = None
    ) -> None:
        """Add a value to a histogram.

        Args:
            trace: of the step that it comes from; if it is sampled, the value may become an
                exemplar that leads there.
        """
        context = None
        if trace is not None and trace.flags & SAMPLED:
            context = parent_of(trace)
        self._histograms[metric].record(seconds, _attributes(metric, label), context)

    def observe(self, metric: Metric, values: Callable[[], Observed]) -> None:
        """Ask `values` whenever a counter or gauge is collected: it costs nothing in between.

        Args:
            values: called from a thread of the reader's; must not wait long.
        """

        def asked(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, _attributes(metric, label)) for value, label in values()]

        make: Callable[..., Any] = self._meter.create_observable_counter
        if metric.kind is Kind.GAUGE:
            make = self._meter.create_observable_gauge
        make(metric.name, callbacks=[asked], unit=metric.unit, description=metric.meaning)

    def close(self) -> None:
        """Export what there is, then stop. What could not be exported in time is logged."""
        try:
            self._provider.shutdown(_CLOSE_MILLISECONDS)
        except Exception as error:  # of all readers, also because one took the others' time
            logger.warning("metrics: the last ones were not all exported: %s", error)
        finally:
            if self._text is not None:
                self._text.close()


def _attributes(metric: Metric, label: str) -> dict[str, str]:
    return {metric.label: label} if metric.label else {}
