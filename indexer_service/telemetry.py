"""What the service tells tracing: its stages of kept steps, and calls that carry a context."""

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.held_steps import HeldSteps, TracedStep
from ipc_handoff.doorbells import ServiceBells
from ipc_handoff.findings import Finding
from ipc_handoff.stages import ServiceStage
from ipc_handoff.stamps import StepTimes
from ipc_handoff.telemetry.attributes import Attributes, Times, Value
from ipc_handoff.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_NANOSECONDS = 1e9
# Sooner than spans would leave by themselves: the less time between their leaving and the word.
_EXPORT_SECONDS = 0.2


class StepTelemetry(StepObserver):
    """Exports the spans of the steps that are kept, and tells each worker which ones have left.

    A step is kept if it was sampled, if either side wants it (a finding, a slow step, one that was
    not answered), and then on both sides. What has not left when this process is killed, the
    worker exports in its place. Also a `FindingListener`.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._held: dict[int, HeldSteps] = {}
        self._terms: dict[int, Attributes] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="exported", daemon=True)
        # Of attachments that have ended.
        self._kept = self._dropped = 0

    def decisions(self) -> tuple[int, int]:
        """Steps whose spans were made, and steps of which none were, so far."""
        with self._lock:
            held = list(self._held.values())
            kept = self._kept + sum(each.kept for each in held)
            return kept, self._dropped + sum(each.dropped for each in held)

    def attached(self, attachment: Attachment) -> None:
        with self._lock:
            epoch = attachment.epoch
            self._held[epoch] = HeldSteps(self._tracing, attachment.control.bells)
            self._terms[epoch] = {
                "dsa.epoch": epoch,
                "dsa.engine": attachment.engine,
                "dsa.placement": attachment.placement,
            }
            if self._thread.ident is None:
                self._thread.start()

    def found(self, finding: Finding) -> None:
        with self._lock:
            if (held := self._held.get(finding.epoch)) is not None:
                held.found(finding)

    def step_finished(self, step: FinishedStep) -> None:
        plan, report = step.plan, step.report
        with self._lock:
            if (held := self._held.get(report.epoch)) is None:
                return
            is_rejected = report.status == pb.STEP_STATUS_REJECTED
            # The number of a plan that was refused may be another step's. After detachment the
            # worker exports this step's stages itself, as incomplete.
            if not plan.trace.trace_id or is_rejected or held.bells.is_detached():
                held.forget(plan.step)
                return
            keep = report.status != pb.STEP_STATUS_ANSWERED or self._is_slow(step.times)
            held.add(TracedStep(step, self._attributes(step)), keep)

    def ended(self, epoch: int) -> None:
        with self._lock:
            held = self._held.pop(epoch, None)
            self._terms.pop(epoch, None)
            if held is not None:
                held.end()
                self._kept += held.kept
                self._dropped += held.dropped

    def _attributes(self, step: FinishedStep) -> dict[str, Value]:
        plan, report, times, _ = step
        attributes: dict[str, Value] = {
            **self._terms[report.epoch],
            "dsa.step": plan.step,
            "dsa.rows": plan.rows,
            "dsa.requests": plan.requests,
            "dsa.context": plan.max_length,
            "dsa.status": pb.StepStatus.Name(report.status),
            "dsa.faulted_rows": report.fault_count,
        }
        if isinstance(times, StepTimes) and times.clock_error is not None:
            attributes["dsa.clock_error_ns"] = times.clock_error
        return attributes

    def _is_slow(self, times: Times | None) -> bool:
        slow = self._tracing.slow_seconds
        if slow is None or not times:
            return False
        begun = [stamps[ServiceStage.GATE_PASSED] for stamps in times]
        ended = max(max(stamps) for stamps in times)
        return ended - min(filter(None, begun), default=ended) > slow * _NANOSECONDS

    def _run(self) -> None:
        while not self._tracing.wait_closed(_EXPORT_SECONDS):
            try:
                self._settle()
            except Exception:
                logger.exception("exporting spans failed")

    def _settle(self) -> None:
        with self._lock:
            made: list[tuple[ServiceBells, list[int]]] = []
            for held in self._held.values():
                held.settle()
                if held.exported:
                    made.append((held.bells, held.exported))
                    held.exported = []
        # Without the lock: it may wait for a collector.
        if made and self._tracing.flush():
            for bells, steps in made:
                for step in steps:
                    bells.exported(step)


class CallTelemetry(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A span for every unary call whose metadata carry a W3C context; other calls cost nothing."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any]]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """gRPC calls this for every call."""
        handler = await continuation(handler_call_details)
        metadata = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        }
        behavior: Any = handler.unary_unary if handler is not None else None
        if behavior is None or "traceparent" not in metadata:
            return handler
        name = handler_call_details.method.removeprefix("/")

        async def traced(request: Any, context: Any) -> Any:
            with self._tracing.server_call(name, metadata):
                return await behavior(request, context)

        return grpc.unary_unary_rpc_method_handler(
            traced,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
