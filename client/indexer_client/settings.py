"""The client's settings, from arguments or `DSA_INDEXER_*` variables."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from ipc_handoff.addresses import default_address
from ipc_handoff.detectors import ALL, DETECTORS_PATTERN, NONE
from ipc_handoff.telemetry.settings import MetricSettings, TraceSettings

_TELEMETRY_NAME = "dsa-indexer-worker"
_EXPORT_SECONDS = 0.2


class ClientSettings(BaseSettings):
    """Every field can be set by a variable of its name: DSA_INDEXER_ADDRESS and so on.

    An empty variable counts as none. One environment can hold the service's settings too.
    """

    model_config = SettingsConfigDict(
        env_prefix="DSA_INDEXER_", env_ignore_empty=True, extra="ignore"
    )

    address: str = Field(
        default_factory=default_address, description="`unix:PATH` or `host:port` of the service"
    )
    engine: str = Field(default="auto", description="wanted engine")
    signalling: str = Field(
        default="ring", pattern="^(ring|stream)$", description="how plans travel"
    )
    placement: str = Field(
        default="auto",
        pattern="^(auto|mps|peer_gpu|timeslice|inline|cpu)$",
        description="where the service works, relative to this worker; inline: no service",
    )
    wait_bound_seconds: float = Field(
        default=1.0,
        gt=0,
        description="a wait for an answer ends after so long without progress of the service",
    )
    rpc_timeout_seconds: float = Field(default=5.0, gt=0, description="deadline of a call")
    register_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="deadline of RegisterRegions, in which a service may make kernels",
    )
    reattach_seconds: float = Field(
        default=0.5, gt=0, description="longest pause between attempts to attach"
    )
    banks: int = Field(default=2, ge=1, description="banks of staging and answer memory")
    detectors: str = Field(
        default=ALL,
        pattern=DETECTORS_PATTERN,
        description=f"detectors of races that are on: {ALL}, {NONE}, or names by comma",
    )
    client_tls_certificate: Path | None = Field(
        default=None, description="PEM, this side's certificate for mutual TLS"
    )
    client_tls_key: Path | None = Field(default=None, description="PEM, its key")
    client_tls_server_ca: Path | None = Field(
        default=None, description="PEM, who signs the service's certificate"
    )
    trace_file: Path | None = Field(default=None, description="append spans as JSON lines")
    trace_console: bool = Field(default=False, description="print spans")
    trace_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of steps whose traces are kept in any case"
    )
    trace_slow_seconds: float | None = Field(
        default=None, gt=0, description="traces of steps that take longer are kept too"
    )

    worker_metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="where Prometheus reads the worker's metrics"
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="address that worker_metrics_port is opened on"
    )

    record: Path | None = Field(
        default=None, description="write plans and shapes of all steps here, to be replayed"
    )

    @property
    def metrics(self) -> MetricSettings:
        return MetricSettings(_TELEMETRY_NAME, self.worker_metrics_port, self.metrics_host)

    @property
    def tracing(self) -> TraceSettings:
        return TraceSettings(
            _TELEMETRY_NAME,
            self.trace_file,
            self.trace_console,
            self.trace_ratio,
            self.trace_slow_seconds,
            _EXPORT_SECONDS,
        )
