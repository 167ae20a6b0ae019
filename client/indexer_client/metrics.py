"""What the worker counts, and times, for metrics."""

import logging
from collections.abc import Callable
from weakref import WeakMethod

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.settings import ClientSettings
from indexer_client.statistics import Statistics
from indexer_client.worker_traces import WorkerTraces
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.stages import WORKER_SPANS
from ipc_handoff.telemetry import catalogue
from ipc_handoff.telemetry.attributes import Times
from ipc_handoff.telemetry.metrics import Metrics, Observed, start
from ipc_handoff.telemetry.stage_metrics import record_stages

logger = logging.getLogger(__name__)

_SIDE = "worker"

Count = Callable[[Statistics], Observed]

_COUNTS: dict[catalogue.Metric, Count] = {
    catalogue.LAYERS: lambda s: [(s.answered_layers, "service"), (s.inline_layers, "inline")],
    catalogue.ATTACHMENTS: lambda s: [(s.attachments, "")],
    catalogue.REATTACHMENTS: lambda s: [(max(s.attachments - 1, 0), "")],
    catalogue.DETACHMENTS: lambda s: [(s.detachments, "")],
    catalogue.LOST_STAMPS: lambda s: [(s.lost_stamps, _SIDE)],
}


def start_metrics(settings: ClientSettings) -> Metrics | None:
    """Metrics as the settings and the `OTEL_*` variables want them; None: off.

    A port that cannot be had is logged: a worker must not fail for it.

    Raises:
        ValueError: an exporter that is not here is asked for.
    """
    try:
        return start(settings.metrics)
    except OSError as error:
        logger.warning(
            "worker_metrics_port: %s: %s (fix: a free port for each worker, or OTLP)",
            settings.worker_metrics_port,
            error.strerror,
        )
        return start(settings.model_copy(update={"worker_metrics_port": None}).metrics)


class WorkerMetrics:
    """Args:
    statistics: a method that tells them; its object is not kept by this.
    traces: whose decisions are counted.
    """

    def __init__(
        self,
        metrics: Metrics,
        statistics: Callable[[], Statistics],
        traces: WorkerTraces | None,
    ) -> None:
        self._metrics = metrics
        # A series that begins above zero hides its first event from a rate.
        for kind in FindingKind:
            metrics.count(catalogue.FINDINGS, 0, kind.value)
        told = WeakMethod(statistics)

        def observed(count: Count) -> Observed:
            tell = told()
            return [] if tell is None else count(tell())

        for metric, count in _COUNTS.items():
            metrics.observe(metric, lambda count=count: observed(count))  # type: ignore[misc]
        if traces is not None:
            metrics.observe(
                catalogue.TRACES, lambda: [(traces.kept, "kept"), (traces.dropped, "dropped")]
            )

    def step_ended(self, step: int, times: Times | None, trace: pb.TraceContext | None) -> None:
        """A step is over.

        Args:
            times: [layer ordinal][WorkerStage]; None: lost.
        """
        if times is not None:
            record_stages(self._metrics, _SIDE, WORKER_SPANS, times, step, trace)

    def found(self, finding: Finding) -> None:
        self._metrics.count(catalogue.FINDINGS, label=finding.kind.value)

    def close(self) -> None:
        self._metrics.close()
