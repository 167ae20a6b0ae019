"""The service as a whole: build it, start it, stop it. `serving` runs it in a process."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_service.devices import ServiceDevice, check_gate_bound, service_device
from indexer_service.engine import Engine, EngineSettings, create_engine
from indexer_service.errors import ServiceError, StartError
from indexer_service.events import StepObserver, StepObservers
from indexer_service.guard import Guard
from indexer_service.handlers import Handlers
from indexer_service.listening import Listener, create_listener
from indexer_service.metrics import StepMetrics
from indexer_service.runner import RunnerSettings
from indexer_service.session_steps import StepResources
from indexer_service.session_table import SessionTable
from indexer_service.settings import Settings
from indexer_service.status import StatusReporter
from indexer_service.threads import in_thread
from ipc_handoff.detectors import Detection, detectors
from ipc_handoff.findings import FindingListener, FindingLog, Findings

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name
_CALLS_A_CONNECTION = 128
_LOOK_SECONDS = 0.5
# Read when the GPU's context is made. By default streams share 8 queues of the hardware: a gate
# that waits in one session's stream would hold up another session's.
_CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class Service:
    """One running service; all methods on one event loop.

    Args:
        engine: default: the one that the settings name.
        observer: told of every finished step.
        metrics: told of it too, and asks for sessions and memory.
        findings: told of what the detectors find, besides the log.
        interceptors: stand before the service's own.

    Attributes:
        address: what clients connect to, once started.
        device: what it computes on.

    Raises:
        StartError: settings that cannot be served.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        engine: Engine | None = None,
        observer: StepObserver | None = None,
        metrics: StepMetrics | None = None,
        findings: FindingListener | None = None,
        interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
    ) -> None:
        self._settings = settings
        os.environ.setdefault(*_CONNECTIONS)
        self.device = service_device(settings.device)
        check_gate_bound(self.device, settings.gate_bound_seconds)
        self._engine = _engine(settings, self.device) if engine is None else engine
        told = [each for each in (observer, metrics) if each is not None]
        self._observer = StepObservers(*told) if told else None
        self._metrics = metrics
        self._finding_log = FindingLog()
        listeners: list[FindingListener] = [self._finding_log, *told]
        if findings is not None:
            listeners.append(findings)
        self._detection = Detection(Findings(*listeners), detectors(settings.detectors))
        self._listener: Listener = create_listener(settings)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            interceptors=[*interceptors, Guard(SERVICE_NAME)],
            options=[
                ("grpc.max_receive_message_length", int(settings.max_message_bytes)),
                ("grpc.max_concurrent_streams", _CALLS_A_CONNECTION),
                # Two services on one TCP port would share its connections.
                ("grpc.so_reuseport", 0),
            ],
        )
        self._table: SessionTable | None = None
        self._device_is_lost = asyncio.Event()
        self.address = settings.address

    async def start(self) -> None:
        """Listen, then warm up; afterwards sessions are accepted and health is SERVING.

        Raises:
            StartError: the address cannot be had, or the engine does not work here.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._listener.bind(self._server)
        table = self._table = SessionTable(
            self._settings,
            StepResources(
                self._engine,
                RunnerSettings(self._settings.gate_bound_seconds, self._settings.queued_steps),
                self._observer,
                self._detection,
                self._note_device_lost(),
            ),
            self._listener.descriptors,
            self.device,
        )
        if self._metrics is not None:
            self._metrics.observe(table)
        reporter = StatusReporter(table, self._engine.configuration, self.device)
        handlers = Handlers(table, reporter, self._settings, self._listener.descriptor_socket)
        rpc.add_IndexerServiceServicer_to_server(handlers, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self._server.start()
        self.address = await self._listener.publish()
        logger.info("dsa-indexer %s listens on %s", reporter.version, self.address)
        await self._warm_up()
        table.refusal = None
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        logger.info("serving with engine %s", self._engine.configuration.engine)

    async def replaced(self) -> None:
        """Return once another service has taken the address over: this one was frozen, say."""
        while not self._listener.is_replaced():
            await asyncio.sleep(_LOOK_SECONDS)
        logger.warning("another service has taken over %s: stopping", self.address)

    async def device_lost(self) -> None:
        """Return once the GPU's context is gone; health is NOT_SERVING from then on."""
        await self._device_is_lost.wait()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        logger.critical("the GPU's context is gone, and with it every session: stopping")

    async def stop(self) -> None:
        """Answer the steps that have arrived, end every session, leave no file behind.

        Takes about `shutdown_grace_seconds` at most. Also after a start that failed.
        """
        grace = self._settings.shutdown_grace_seconds
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._table is not None:
            await self._table.shut(grace)
        # Streams have ended with their sessions; what is left are clients that do not read.
        await self._server.stop(min(grace / 4, 1.0))
        await self._listener.close()
        self._finding_log.close()
        logger.info("stopped")

    def _note_device_lost(self) -> Callable[[], None]:
        """What any thread may call."""
        loop, event = asyncio.get_running_loop(), self._device_is_lost

        def note() -> None:
            with suppress(RuntimeError):  # the loop has ended, and every session with it
                loop.call_soon_threadsafe(event.set)

        return note

    async def _warm_up(self) -> None:
        try:
            await in_thread(self._engine.warm_up)
        except Exception as error:
            logger.exception("warm-up failed")
            raise StartError(
                f"engine: {self._engine.configuration.engine} does not work here: {error} "
                "(fix: another engine, or see the log)"
            ) from error

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


def _engine(settings: Settings, device: ServiceDevice) -> Engine:
    try:
        return create_engine(
            settings.engine,
            EngineSettings(settings.workspace_bytes, settings.cpu_threads, device.torch_device),
        )
    except ServiceError as error:
        raise StartError(str(error)) from None
