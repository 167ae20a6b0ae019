"""The service as a whole: build it, start it, stop it."""

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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
from indexer_service.executor import DeviceLost
from indexer_service.guard import Guard
from indexer_service.handlers import Handlers
from indexer_service.listening import Listener, create_listener
from indexer_service.metrics import StepMetrics
from indexer_service.runner import RunnerSettings
from indexer_service.session_steps import StepResources
from indexer_service.session_table import SessionTable
from indexer_service.settings import Settings
from indexer_service.status import StatusReporter
from indexer_service.telemetry import CallTelemetry, StepTelemetry
from indexer_service.threads import in_thread
from ipc_handoff.detectors import Detection, detectors
from ipc_handoff.findings import FindingListener, FindingLog, Findings
from ipc_handoff.telemetry.metrics import Metrics
from ipc_handoff.telemetry.metrics import start as start_metrics
from ipc_handoff.telemetry.settings import MetricSettings, TraceSettings
from ipc_handoff.telemetry.tracing import Tracing
from ipc_handoff.telemetry.tracing import start as start_tracing

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name
_TELEMETRY_NAME = "dsa-indexer-service"
_CALLS_A_CONNECTION = 128
_LOOK_SECONDS = 0.5
# Read when the GPU's context is made. By default streams share 8 queues of the hardware: a gate
# that waits in one session's stream would hold up another session's.
_CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Seconds after which a thread must give Python's lock up to one that waits for it. Launching a step
# takes the lock several times, and while another session's kernels are made its thread may hold it:
# at Python's 5 ms, a few of these would be longer than a worker waits for an answer.
_SWITCH_SECONDS = 0.0001
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


async def serve(
    settings: Settings, *, tracing: Tracing | None = None, metrics: Metrics | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, or until another service has taken the address over.

    Args:
        tracing: where spans of steps and calls go.
        metrics: where metrics go.

    Raises:
        StartError: the service cannot start.
        DeviceLost: the GPU's context was lost; a new process has a new one.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    telemetry = StepTelemetry(tracing) if tracing else None
    step_metrics = StepMetrics(metrics) if metrics else None
    if telemetry is not None and step_metrics is not None:
        step_metrics.observe_traces(telemetry)
    service = Service(
        settings,
        observer=telemetry,
        metrics=step_metrics,
        interceptors=[CallTelemetry(tracing)] if tracing else [],
    )
    if service.device.ordinal is not None:
        sys.setswitchinterval(_SWITCH_SECONDS)
    asked = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(service.start())
    try:
        # A signal during warm-up counts too.
        await asyncio.wait({asked, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            replaced = asyncio.create_task(service.replaced())
            lost = asyncio.create_task(service.device_lost())
            await asyncio.wait({asked, replaced, lost}, return_when=asyncio.FIRST_COMPLETED)
            replaced.cancel()
            if lost.done():
                raise DeviceLost("the GPU's context is gone: start the service again")
            lost.cancel()
    finally:
        # A start that was broken off must have ended: what it still makes, nobody would take away.
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await service.stop()


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Logs, and prints nothing; spans go where settings say.

    Raises:
        StartError: the service cannot start.
        DeviceLost: the GPU's context was lost.
    """
    _raise_descriptor_limit()
    with ExitStack() as stack:
        if (tracing := _tracing(settings)) is not None:
            stack.callback(tracing.close)
        if (metrics := _metrics(settings)) is not None:
            stack.callback(metrics.close)
        asyncio.run(serve(settings, tracing=tracing, metrics=metrics))


def _raise_descriptor_limit() -> None:
    """Every mapping holds two descriptors, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tracing(settings: Settings) -> Tracing | None:
    try:
        return start_tracing(
            TraceSettings(
                _TELEMETRY_NAME,
                settings.trace_file,
                settings.trace_console,
                settings.trace_ratio,
                settings.trace_slow_seconds,
            )
        )
    except OSError as error:
        raise StartError(
            f"trace_file: {settings.trace_file}: {error.strerror} (fix: a file that can be written)"
        ) from None
    except ValueError as error:
        raise StartError(str(error)) from None


def _metrics(settings: Settings) -> Metrics | None:
    wanted = MetricSettings(_TELEMETRY_NAME, settings.metrics_port, settings.metrics_host)
    try:
        return start_metrics(wanted)
    except OSError as error:
        raise StartError(
            f"metrics_port: {settings.metrics_host}:{settings.metrics_port}: {error.strerror} "
            "(fix: a port that is free)"
        ) from None
    except ValueError as error:
        raise StartError(str(error)) from None
