"""What the service tells tracing: its stages of every sampled step."""

from collections.abc import Sequence

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.stages import SERVICE_SPANS
from ipc_handoff.tracing import Times, Tracing

_SAMPLED = 1


class StepTelemetry:
    """A `StepObserver` that exports spans."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def step_finished(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        times: Times | None,
        layers: Sequence[int],
    ) -> None:
        if times is None or not plan.trace.flags & _SAMPLED:
            return
        self._tracing.service_stages(
            plan,
            SERVICE_SPANS,
            times,
            layers,
            {
                "dsa.step": plan.step,
                "dsa.epoch": plan.epoch,
                "dsa.rows": plan.rows,
                "dsa.status": pb.StepStatus.Name(report.status),
                "dsa.faulted_rows": report.fault_count,
            },
        )
