"""What both sides' settings say about telemetry; `OTEL_*` variables say the rest."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TraceSettings:
    """Where spans go, and of which steps.

    Attributes:
        ratio: share of steps that a worker keeps whatever happens in them.
        slow_seconds: a step that takes longer is kept too; None: none is kept for that.
        export_seconds: how often they leave without `Tracing.flush`.
    """

    service_name: str
    file: Path | None = None
    console: bool = False
    ratio: float = 1.0
    slow_seconds: float | None = None
    export_seconds: float = 1.0


@dataclass(frozen=True)
class MetricSettings:
    """Where metrics go.

    Attributes:
        port: where Prometheus reads them, on `host`; 0: any free one; None: nowhere.
    """

    service_name: str
    port: int | None = None
    host: str = "127.0.0.1"
