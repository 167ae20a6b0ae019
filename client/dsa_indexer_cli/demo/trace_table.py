"""What the trace file says: times a stage, and whether each step is one trace over both sides."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import quantiles

from dsa_indexer_cli.trace.spans import Span
from ipc_handoff.stages import SERVICE_SPANS, STEP_SPAN, WORKER_SPANS

STAGES = tuple(span.name for span in (WORKER_SPANS[0], *SERVICE_SPANS, *WORKER_SPANS[1:]))


@dataclass(frozen=True)
class StageTimes:
    """Durations of one stage in microseconds. `process`: the service's name in the trace."""

    stage: str
    process: str
    spans: int
    incomplete: int
    p50: float
    p99: float


def stage_times(spans: Iterable[Span]) -> list[StageTimes]:
    """One entry a stage and process, in the order of the hand-over; the whole step last."""
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    incomplete: dict[tuple[str, str], int] = defaultdict(int)
    for span in spans:
        key = (span.name, span.service)
        durations[key].append((span.end - span.begin) / 1000)
        incomplete[key] += bool(span.attributes.get("dsa.incomplete"))
    order = {name: place for place, name in enumerate((*STAGES, STEP_SPAN))}
    table = []
    for key in sorted(durations, key=lambda key: (order.get(key[0], len(order)), key[1])):
        if key[0] in order:
            p50, p99 = _percentiles(durations[key])
            table.append(StageTimes(*key, len(durations[key]), incomplete[key], p50, p99))
    return table


def whole_traces(spans: Iterable[Span]) -> set[str]:
    """Ids of the traces that have one step span and every stage of the hand-over."""
    names: dict[str, list[str]] = defaultdict(list)
    for span in spans:
        names[span.trace].append(span.name)
    wanted = set(STAGES) - {"dsa.attend"}
    return {
        trace
        for trace, found in names.items()
        if found.count(STEP_SPAN) == 1 and wanted <= set(found)
    }


def _percentiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
