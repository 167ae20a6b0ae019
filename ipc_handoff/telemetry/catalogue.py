"""Every metric there is: names, units, labels. `docs/tracing.md` has the same table."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a metric's value does."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """Attributes:
    name: in OTLP.
    unit: as OpenTelemetry writes it; empty: a number of things.
    label: the attribute that tells its series apart; empty: it has one.
    sides: who tells it.
    """

    name: str
    kind: Kind
    unit: str
    label: str
    sides: tuple[str, ...]
    meaning: str

    @property
    def prometheus_name(self) -> str:
        """As Prometheus shows it: units and the kind of a counter are part of the name."""
        unit = {"": "", "s": "_seconds", "By": "_bytes"}[self.unit]
        return f"{self.name}{unit}{'_total' if self.kind is Kind.COUNTER else ''}"


WORKER, SERVICE = ("worker",), ("service",)
BOTH = WORKER + SERVICE

STAGE = Metric(
    "dsa_indexer_stage", Kind.HISTOGRAM, "s", "stage", BOTH,
    "time of a stage; of each step one layer, in turn",
)  # fmt: skip
STEP = Metric(
    "dsa_indexer_step", Kind.HISTOGRAM, "s", "side", BOTH,
    "a step, from a side's first stamp to its last",
)  # fmt: skip
FINDINGS = Metric(
    "dsa_indexer_findings", Kind.COUNTER, "", "kind", BOTH, "races and inputs that were found"
)
LOST_STAMPS = Metric(
    "dsa_indexer_lost_stamps", Kind.COUNTER, "", "side", BOTH,
    "steps whose stamps were overwritten before they were read",
)  # fmt: skip
TRACES = Metric(
    "dsa_indexer_traces", Kind.COUNTER, "", "decision", BOTH,
    "traced steps of which a side's spans were kept, or dropped",
)  # fmt: skip
LAYERS = Metric(
    "dsa_indexer_layers", Kind.COUNTER, "", "source", WORKER,
    "layers answered by the service, or computed inline (the fallback)",
)  # fmt: skip
ATTACHMENTS = Metric(
    "dsa_indexer_attachments", Kind.COUNTER, "", "", WORKER, "attachments that began"
)
REATTACHMENTS = Metric(
    "dsa_indexer_reattachments", Kind.COUNTER, "", "", WORKER, "of these, all but the first"
)
DETACHMENTS = Metric(
    "dsa_indexer_detachments", Kind.COUNTER, "", "", WORKER,
    "attachments that ended otherwise than by the worker's close",
)  # fmt: skip
STEPS = Metric("dsa_indexer_steps", Kind.COUNTER, "", "status", SERVICE, "steps, by how they ended")
FAULTED_ROWS = Metric(
    "dsa_indexer_faulted_rows", Kind.COUNTER, "", "", SERVICE,
    "rows that were answered with -1, since their inputs could not be trusted",
)  # fmt: skip
STALE_EPOCHS = Metric(
    "dsa_indexer_stale_epochs", Kind.COUNTER, "", "", SERVICE,
    "calls and plans that were refused for their epoch",
)  # fmt: skip
SESSIONS = Metric("dsa_indexer_sessions", Kind.GAUGE, "", "", SERVICE, "open sessions")
REGIONS = Metric("dsa_indexer_regions", Kind.GAUGE, "", "", SERVICE, "registered regions")
MAPPED = Metric(
    "dsa_indexer_mapped", Kind.GAUGE, "By", "", SERVICE, "memory of workers that is mapped"
)
QUEUED_STEPS = Metric(
    "dsa_indexer_queued_steps", Kind.GAUGE, "", "", SERVICE, "plans that wait for their turn"
)

METRICS = (
    STAGE, STEP, FINDINGS, LOST_STAMPS, TRACES, LAYERS, ATTACHMENTS, REATTACHMENTS, DETACHMENTS,
    STEPS, FAULTED_ROWS, STALE_EPOCHS, SESSIONS, REGIONS, MAPPED, QUEUED_STEPS,
)  # fmt: skip
