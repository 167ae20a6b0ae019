"""What the standard `OTEL_*` variables choose."""

import os
import socket
import time
from collections.abc import Collection

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from ipc_handoff.stages import HOST_CLOCK_TICK

OTLP = "otlp"
CONSOLE = "console"


def is_disabled() -> bool:
    """Whether OpenTelemetry is switched off as a whole."""
    return os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"


def resource(service_name: str) -> Resource:
    """Who tells; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win."""
    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    pid = os.getpid()
    # Metrics of two workers are told apart by it. The SDK's own is made once, when it is imported:
    # processes that are forked after that would share it.
    instance = {"service.instance.id": f"{socket.gethostname()}:{pid}"}
    given = OTELResourceDetector().detect().attributes
    tick = round(time.get_clock_info("monotonic").resolution * 1e9)
    return Resource.create(
        {
            "service.name": name,
            "process.pid": pid,
            HOST_CLOCK_TICK: tick,
            **{key: value for key, value in instance.items() if key not in given},
        }
    )


def wanted_exporters(signal: str, known: Collection[str]) -> set[str]:
    """What `OTEL_<signal>_EXPORTER` names; without it OTLP, if an endpoint is given.

    Args:
        signal: TRACES or METRICS.
        known: exporters that are here.

    Raises:
        ValueError: the variable names another one.
    """
    variable = f"OTEL_{signal}_EXPORTER"
    named = os.environ.get(variable, "")
    if not named:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        return {OTLP} if any(map(os.environ.get, endpoints)) else set()
    wanted = {name.strip() for name in named.split(",")} - {"none"}
    if unknown := wanted - set(known):
        choices = ", ".join(sorted(known))
        raise ValueError(f"{variable}: {min(unknown)!r} is not here (fix: {choices} or none)")
    return wanted


def check_protocol(signal: str) -> None:
    """Raise ValueError unless OTLP is wanted over gRPC."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next(filter(os.environ.get, names), None)
    if name is not None and (protocol := os.environ[name]) != "grpc":
        raise ValueError(
            f"{name}: {protocol!r} is not here (fix: grpc, which collectors take at port 4317)"
        )
