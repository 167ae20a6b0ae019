"""A step between its plan and its report."""

import logging
import time

import grpc

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import ServiceError
from indexer_service.executor import BegunStep, StepCancelled
from indexer_service.plan_queue import OnReport
from ipc_handoff.layout import MESSAGE_BYTES
from ipc_handoff.telemetry.log_ids import log_lines_of

logger = logging.getLogger(__name__)


class RunningStep:
    """Attributes:
    begun: what the executor made of it; None if it refused it, or failed at once.
    """

    def __init__(self, plan: pb.StepPlan, on_report: OnReport, epoch: int) -> None:
        self.plan = plan
        self.report = pb.StepReport(step=plan.step, epoch=epoch)
        self.begun: BegunStep | None = None
        self._on_report = on_report
        self._began = time.monotonic_ns()

    def conclude(self, error: Exception | None) -> None:
        """Say in the report how the step ended; None: it was answered."""
        with log_lines_of(self.plan.trace):
            self._conclude(error)

    def _conclude(self, error: Exception | None) -> None:
        if error is None:
            self.report.status = pb.STEP_STATUS_ANSWERED
        elif isinstance(error, ServiceError):
            self._give_up(pb.STEP_STATUS_REJECTED, error.code, str(error))
        elif isinstance(error, StepCancelled):
            self._give_up(pb.STEP_STATUS_CANCELLED, grpc.StatusCode.CANCELLED, str(error))
        else:
            logger.error(
                "epoch %d, step %d: the engine failed",
                self.report.epoch,
                self.report.step,
                exc_info=error,
            )
            self._give_up(pb.STEP_STATUS_FAILED, grpc.StatusCode.INTERNAL, f"engine: {error}")

    def tell(self) -> None:
        """Send the report."""
        self.report.duration_ns = time.monotonic_ns() - self._began
        self._on_report(self.report)

    def _give_up(self, status: "pb.StepStatus", code: grpc.StatusCode, message: str) -> None:
        self.report.status = status
        self.report.code = code.value[0]
        self.report.message = message.encode()[:MESSAGE_BYTES].decode(errors="ignore")
