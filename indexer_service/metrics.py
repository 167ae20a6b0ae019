"""What the service counts, and times, for metrics."""

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.session_table import SessionTable
from indexer_service.telemetry import StepTelemetry
from ipc_handoff.findings import Finding, FindingKind
from ipc_handoff.stages import SERVICE_SPANS
from ipc_handoff.telemetry import catalogue
from ipc_handoff.telemetry.metrics import Metrics, Observed
from ipc_handoff.telemetry.stage_metrics import record_stages

_SIDE = "service"


class StepMetrics(StepObserver):
    """Counts steps, and times one layer of each. Also a `FindingListener`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stale_plans = 0
        # A series that begins above zero hides its first event from a rate.
        for kind in FindingKind:
            metrics.count(catalogue.FINDINGS, 0, kind.value)
        for status, number in pb.StepStatus.items():
            if number != pb.STEP_STATUS_UNSPECIFIED:
                metrics.count(catalogue.STEPS, 0, _label(status))
        metrics.count(catalogue.FAULTED_ROWS, 0)
        metrics.count(catalogue.LOST_STAMPS, 0, _SIDE)

    def step_finished(self, step: FinishedStep) -> None:
        metrics, plan, report = self._metrics, step.plan, step.report
        metrics.count(catalogue.STEPS, label=_label(pb.StepStatus.Name(report.status)))
        if report.fault_count:
            metrics.count(catalogue.FAULTED_ROWS, report.fault_count)
        if report.status == pb.STEP_STATUS_REJECTED:
            if plan.epoch != report.epoch:
                self._stale_plans += 1
            return
        if step.times is None:
            metrics.count(catalogue.LOST_STAMPS, label=_SIDE)
        else:
            record_stages(metrics, _SIDE, SERVICE_SPANS, step.times, plan.step, plan.trace)

    def found(self, finding: Finding) -> None:
        self._metrics.count(catalogue.FINDINGS, label=finding.kind.value)

    def observe(self, table: SessionTable) -> None:
        """Have gauges ask `table` whenever they are collected."""
        for metric, value in (
            (catalogue.SESSIONS, lambda: len(table.sessions)),
            (catalogue.REGIONS, lambda: sum(len(s.regions.names) for s in table.sessions)),
            (catalogue.MAPPED, lambda: table.mapped_bytes),
            (catalogue.QUEUED_STEPS, lambda: sum(s.queued_steps for s in table.sessions)),
            (catalogue.STALE_EPOCHS, lambda: table.stale_epochs + self._stale_plans),
        ):
            self._metrics.observe(metric, lambda value=value: [(value(), "")])  # type: ignore[misc]

    def observe_traces(self, telemetry: StepTelemetry) -> None:
        """Have the counter of kept and dropped traces ask `telemetry`."""

        def decisions() -> Observed:
            kept, dropped = telemetry.decisions()
            return [(kept, "kept"), (dropped, "dropped")]

        self._metrics.observe(catalogue.TRACES, decisions)


def _label(status: str) -> str:
    return status.removeprefix("STEP_STATUS_").lower()
