"""What a load test found, and whether that is good enough."""

from dataclasses import asdict, dataclass, field
from typing import Any

from dsa_indexer_cli.load.histograms import Times
from dsa_indexer_cli.load.messages import Counts
from dsa_indexer_cli.load.resources import GpuSample, Growth, Sample
from dsa_indexer_cli.load.workload import CPU, INLINE, Limits, Workload
from ipc_handoff.layout import HandoffGeometry


@dataclass(frozen=True)
class Verdict:
    """One thing that must hold."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class ShapeResult:
    """Steps of one shape; requests and context are upper bounds."""

    kind: str
    requests: int
    context: int
    steps: int
    rows: int
    response: Times
    step: Times
    layer: Times
    forward: Times


@dataclass(frozen=True)
class PointResult:
    """A stretch of time. Milliseconds."""

    seconds: float
    steps_a_second: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Service:
    """Who was asked.

    Attributes:
        address: empty: nobody, all was computed inline.
        placement: where the service works, relative to the sessions.
        gpu: of the sessions, by name; empty: they are on the CPU.
    """

    address: str
    version: str
    pid: int
    engine: str
    reasons: tuple[str, ...]
    placement: str = CPU
    gpu: str = ""


@dataclass(kw_only=True)
class LoadResult(Counts):
    """Everything.

    Attributes:
        response: from when a step was to begin (open loop: its arrival) to its end.
        step: from when it did begin.
        layer: one selection, as the worker sees it; on a GPU by the stamps of some steps.
        forward: all selections of a step, by the GPU's clock; empty on a CPU.
        points: over time.
        samples: by process or GPU, what it held.
        curve: percentiles of `response` and `step` for plotting, as [percentile, milliseconds].
    """

    workload: Workload
    geometry: HandoffGeometry
    service: Service
    seconds: float
    steps: int
    rows: int
    layers: int
    inline_layers: int
    unserved_steps: int
    steps_a_second: float
    rows_a_second: float
    response: Times
    step: Times
    layer: Times
    forward: Times
    shapes: list[ShapeResult] = field(default_factory=list)
    points: list[PointResult] = field(default_factory=list)
    samples: dict[str, list[Sample | GpuSample]] = field(default_factory=dict)
    growths: list[Growth] = field(default_factory=list)
    curve: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.verdicts) and all(verdict.ok for verdict in self.verdicts)

    @property
    def is_open_loop(self) -> bool:
        """Whether steps came whatever became of those before."""
        return self.workload.load.mode != "closed"

    @property
    def inline_share(self) -> float:
        return self.inline_layers / self.layers if self.layers else 0.0

    @property
    def is_inline(self) -> bool:
        """Whether no service was to be asked."""
        return self.workload.load.placement == INLINE

    def as_json(self) -> dict[str, Any]:
        """For machines; times in milliseconds."""
        found = asdict(self)
        found["workload"] = self.workload.model_dump(mode="json", exclude_none=True)
        found["ok"] = self.ok
        found["inline_share"] = self.inline_share
        return found


def judge(result: LoadResult) -> list[Verdict]:
    """What must hold always, then the workload's limits, then what a soak watches."""
    limits = result.workload.limits
    wants_answers = result.workload.check.share and not result.is_inline
    found = [
        Verdict("sessions", not result.failures, "; ".join(result.failures) or "none failed"),
        Verdict("steps", result.steps > 0, f"{result.steps} counted"),
        Verdict(
            "answers",
            not result.wrong_answers and (result.checked > 0 or not wants_answers),
            f"{result.checked} compared with the reference, {result.wrong_answers} wrong"
            + "".join(f"\n{line}" for line in result.wrong),
        ),
        Verdict(
            "inputs",
            not result.rejected_steps and not result.faulted_rows,
            f"{result.rejected_steps} plans refused, {result.faulted_rows} rows not trusted",
        ),
        Verdict(
            "inline_share",
            result.is_inline or result.inline_share <= limits.inline_share,
            f"{result.inline_layers} of {result.layers} layers not answered by the service, "
            + ("as was asked for" if result.is_inline else f"allowed {limits.inline_share:.1%}"),
        ),
        Verdict(
            "unserved_steps",
            result.unserved_steps <= limits.unserved_steps,
            f"{result.unserved_steps} arrived and were never begun, allowed "
            f"{limits.unserved_steps}",
        ),
        *_times(result, limits),
    ]
    if result.workload.soak is not None:
        found += _growths(result)
    return found


def _times(result: LoadResult, limits: Limits) -> list[Verdict]:
    found = [
        Verdict(name, seen <= limit, f"{seen:.2f} ms, allowed {limit:g}")
        for name, seen, limit in (
            ("step_p50_milliseconds", result.response.p50, limits.step_p50_milliseconds),
            ("step_p99_milliseconds", result.response.p99, limits.step_p99_milliseconds),
            ("layer_p99_milliseconds", result.layer.p99, limits.layer_p99_milliseconds),
        )
        if limit is not None
    ]
    if (least := limits.steps_a_second) is not None:
        seen = result.steps_a_second
        found.append(
            Verdict("steps_a_second", seen >= least, f"{seen:.1f}, wanted {least:g} or more")
        )
    return found


def _growths(result: LoadResult) -> list[Verdict]:
    watched = {growth.process for growth in result.growths}
    found = [
        Verdict(f"soak: {process}", False, "too few looks at it to say anything (fix: run longer)")
        for process in result.samples
        if process not in watched
    ]
    if "service" not in result.samples and not result.is_inline:
        found.append(
            Verdict("soak: service", False, "it cannot be looked at (fix: its user and namespace)")
        )
    return found + [
        Verdict(
            f"soak: {growth.process}, {growth.what}",
            growth.ok,
            f"{growth.first:.1f}, at the end {growth.last:.1f}, growth allowed {growth.allowed:g}",
        )
        for growth in result.growths
    ]
