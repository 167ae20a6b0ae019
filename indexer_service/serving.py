"""A process that serves: settings, signals, telemetry, and the service's life among them."""

import asyncio
import resource
import signal
import sys
from contextlib import ExitStack

from indexer_service.errors import StartError
from indexer_service.executor import DeviceLost
from indexer_service.metrics import StepMetrics
from indexer_service.server import Service
from indexer_service.settings import Settings
from indexer_service.telemetry import CallTelemetry, StepTelemetry
from ipc_handoff.telemetry.metrics import Metrics
from ipc_handoff.telemetry.metrics import start as start_metrics
from ipc_handoff.telemetry.settings import MetricSettings, TraceSettings
from ipc_handoff.telemetry.tracing import Tracing
from ipc_handoff.telemetry.tracing import start as start_tracing

_TELEMETRY_NAME = "dsa-indexer-service"
# Seconds after which a thread must give Python's lock up to one that waits for it. Launching a step
# takes the lock several times, and while another session's kernels are made its thread may hold it:
# at Python's 5 ms, a few of these would be longer than a worker waits for an answer.
_SWITCH_SECONDS = 0.0001
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
