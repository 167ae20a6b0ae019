"""One step as a timeline: two processes, a line for each stage, what was found where."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import gcd
from typing import Any

from dsa_indexer_cli.trace.spans import Event, Span
from ipc_handoff.stages import FINDING_EVENT, SERVICE_SPANS, STEP_SPAN, WORKER_SPANS

CLOCK_ERROR = "dsa.clock_error_ns"
# A wait has no span: what happens in it is drawn where hand-back begins.
_WAIT, _AFTER_WAIT = "dsa.wait", "dsa.handback"
_FEWEST_TIMES = 12
"""So many times have a common divisor by chance once in thousands."""
_SIDES = (("worker", WORKER_SPANS), ("service", SERVICE_SPANS))


class State(Enum):
    """How a stage ended."""

    WELL = "well"
    ERROR = "error"
    INCOMPLETE = "incomplete"
    """Told by the worker in the place of a service that could not."""


@dataclass(frozen=True)
class Bar:
    """A stage of a layer.

    Attributes:
        begin, end: ns since the timeline's begin.
    """

    stage: str
    layer: int
    begin: int
    end: int
    state: State
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Lane:
    """All layers of one stage."""

    stage: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Process:
    """Attributes:
    side: worker or service.
    pids: that told of it: usually one.
    tick: ns; all of its times differ by multiples of it. 0: too few times to tell.
    clock_error: by how much its times may be wrong on the host's clock, ns, if they are a GPU's;
        None: they are the host's own.
    """

    side: str
    pids: tuple[int, ...]
    tick: int
    clock_error: int | None
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment.

    Attributes:
        at: ns since the timeline's begin.
        stage: the line it belongs to; empty: to the whole step.
        told_by: name of the process that told it.
    """

    name: str
    at: int
    stage: str
    told_by: str
    is_finding: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Timeline:
    """Attributes:
    began: wall time, ns.
    duration: ns.
    error: why the step did not end well; empty if it did.
    """

    trace: str
    step: int
    epoch: int
    rows: int
    began: int
    duration: int
    error: str
    processes: tuple[Process, ...]
    marks: tuple[Mark, ...]

    @property
    def findings(self) -> tuple[Mark, ...]:
        return tuple(mark for mark in self.marks if mark.is_finding)

    @property
    def clock(self) -> str:
        """How far the times can be trusted, in a sentence."""
        ticks = ", ".join(f"{p.side} {p.tick:,} ns" for p in self.processes if p.tick)
        tick = f"tick: {ticks or 'not seen'}"
        errors = [
            f"{p.side} within ± {p.clock_error:,} ns"
            for p in self.processes
            if p.clock_error is not None
        ]
        if not errors:
            return f"Both processes by the host's monotonic clock; {tick}."
        return f"Stages by the GPU's clock, on the host's: {', '.join(errors)}; {tick}."


def timelines(spans: Iterable[Span]) -> list[Timeline]:
    """A timeline for every step in `spans`, oldest first."""
    of_trace: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if "dsa.step" in span.attributes:
            of_trace[span.trace].append(span)
    return sorted((_timeline(found) for found in of_trace.values()), key=lambda t: t.began)


def _timeline(spans: list[Span]) -> Timeline:
    # A worker that was killed has left stages, and no span of the step.
    whole = [span for span in spans if span.name == STEP_SPAN]
    began = min(span.begin for span in spans)
    # What was found late has a span of its own.
    timed = [span for span in spans if span.name != FINDING_EVENT] or spans
    ended = max(span.end for span in timed)
    moments = _moments(spans)
    marks = [
        _mark(event, span, moments, began)
        for span in spans
        for event in span.events
        if event.name != "clock"
    ]
    return Timeline(
        trace=spans[0].trace,
        step=_first(spans, "dsa.step"),
        epoch=_first(spans, "dsa.epoch"),
        rows=_first(spans, "dsa.rows"),
        began=began,
        duration=ended - began,
        error=next((span.error for span in whole), "the worker never ended it"),
        processes=tuple(_process(side, [s.name for s in of], spans, began) for side, of in _SIDES),
        marks=tuple(sorted(marks, key=lambda mark: mark.at)),
    )


def _first(spans: Iterable[Span], name: str) -> int:
    return max((int(span.attributes.get(name, 0)) for span in spans), default=0)


def _process(side: str, stages: list[str], spans: list[Span], began: int) -> Process:
    own = [span for span in spans if span.name in stages]
    lanes = []
    for stage in stages:
        bars = [_bar(span, began) for span in own if span.name == stage]
        lanes.append(Lane(stage, tuple(sorted(bars, key=lambda bar: bar.begin))))
    told = {span.pid for span in own if _state(span) is not State.INCOMPLETE}
    # The end of a stage that never ended is the moment at which it was exported.
    times = sorted({span.begin for span in own} | {span.end for span in own if not span.error})
    tick = gcd(*(after - before for before, after in pairwise(times)))
    if len(times) < _FEWEST_TIMES:
        tick = 0
    clock_error = _clock_error(own if side == "service" else _events_of_steps(spans))
    if clock_error is None:
        tick = tick or max((span.host_tick for span in own), default=0)
    return Process(side, tuple(sorted(told)), tick, clock_error, tuple(lanes))


def _events_of_steps(spans: list[Span]) -> list[Event]:
    return [event for span in spans if span.name == STEP_SPAN for event in span.events]


def _clock_error(told_by: Sequence[Span | Event]) -> int | None:
    errors = [part.attributes.get(CLOCK_ERROR) for part in told_by]
    return max((int(error) for error in errors if error is not None), default=None)


def _bar(span: Span, began: int) -> Bar:
    attributes = dict(span.attributes)
    if span.error:
        attributes["status"] = span.error
    return Bar(
        span.name,
        int(attributes.get("dsa.layer", 0)),
        span.begin - began,
        span.end - began,
        _state(span),
        attributes,
    )


def _state(span: Span) -> State:
    if span.attributes.get("dsa.incomplete"):
        return State.INCOMPLETE
    return State.ERROR if span.error else State.WELL


def _moments(spans: Iterable[Span]) -> dict[tuple[str, Any], int]:
    """When something in a stage of a layer was seen: at its end. None: of the first layer."""
    moments: dict[tuple[str, Any], int] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        layer = span.attributes.get("dsa.layer")
        for where in (layer, None):
            moments.setdefault((span.name, where), span.end)
            if span.name == _AFTER_WAIT:
                moments.setdefault((_WAIT, where), span.begin)
    return moments


def _mark(event: Event, span: Span, moments: Mapping[tuple[str, Any], int], began: int) -> Mark:
    attributes = event.attributes
    stage = str(attributes.get("dsa.stage", "" if span.name == STEP_SPAN else span.name))
    if event.name != FINDING_EVENT:
        return Mark(event.name, event.at - began, stage, span.service, False, attributes)
    # It is told when the step is over: what it is about was earlier.
    at = moments.get((stage, attributes.get("dsa.layer")), event.at) - began
    stage = _AFTER_WAIT if stage == _WAIT else stage
    return Mark(str(attributes.get(FINDING_EVENT)), at, stage, span.service, True, attributes)
