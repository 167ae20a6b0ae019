"""What the service tells tracing: its stages of sampled steps, and calls that carry a context."""

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakMethod

import grpc
import grpc.aio

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.stages import SERVICE_SPANS
from ipc_handoff.stamps import OnExported, StepTimes
from ipc_handoff.tracing import Times, Tracing

logger = logging.getLogger(__name__)

_SAMPLED = 1
# Sooner than spans would leave by themselves: the less time between their leaving and the word.
_EXPORT_SECONDS = 0.2


class StepTelemetry:
    """A `StepObserver` that exports spans, and tells each worker which ones have left.

    What has not left when this process is killed, the worker exports in its place.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        # By epoch: the newest step with spans. Nothing here keeps an attachment's memory.
        self._newest: dict[int, tuple[WeakMethod[OnExported], int]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="exported", daemon=True)

    def step_finished(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        times: Times | None,
        layers: Sequence[int],
    ) -> None:
        if times is None or not plan.trace.flags & _SAMPLED:
            return
        attributes: dict[str, str | int] = {
            "dsa.step": plan.step,
            "dsa.epoch": plan.epoch,
            "dsa.rows": plan.rows,
            "dsa.status": pb.StepStatus.Name(report.status),
            "dsa.faulted_rows": report.fault_count,
        }
        if isinstance(times, StepTimes) and times.clock_error is not None:
            attributes["dsa.clock_error_ns"] = times.clock_error
        self._tracing.service_stages(plan, SERVICE_SPANS, times, layers, attributes)
        if isinstance(times, StepTimes) and times.on_exported is not None:
            with self._lock:
                self._newest[plan.epoch] = (WeakMethod(times.on_exported), plan.step)
                if self._thread.ident is None:
                    self._thread.start()

    def _run(self) -> None:
        while not self._tracing.wait_closed(_EXPORT_SECONDS):
            try:
                self._confirm()
            except Exception:
                logger.exception("exporting spans failed")

    def _confirm(self) -> None:
        with self._lock:
            newest, self._newest = self._newest, {}
        if not newest:
            return
        has_left = self._tracing.flush()
        for epoch, (on_exported, step) in newest.items():
            tell = on_exported()
            if tell is None:
                continue
            if has_left:
                tell(step)
            else:
                with self._lock:
                    self._newest.setdefault(epoch, (on_exported, step))


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
