"""What the detectors of both sides find: a race, named with its step, stage and row.

A detector tells a `FindingListener`; logs, counters and traces listen. Telling never waits, never
raises, and never looks at a device.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 10.0


class FindingKind(StrEnum):
    """What raced or was broken. Values are stable: metrics and traces carry them."""

    TORN_INPUT = "torn_input"
    """A length differs from what the CPU planned."""
    BAD_QUERY_OFFSETS = "bad_query_offsets"
    """Query offsets run backwards, or contradict the plan."""
    BAD_LENGTH = "bad_length"
    """A length is negative, or beyond its bound."""
    BAD_POSITION = "bad_position"
    """A row's position contradicts its request's length."""
    BAD_SLOT = "bad_slot"
    """The slot that a row's key is written to is not the one of its table and position."""
    BAD_PAGE = "bad_page"
    """A page that a length needs lies outside the K cache."""
    READ_BEFORE_WRITTEN = "read_before_written"
    """A shared slot was read before its writer had written this step or layer into it."""
    OVERWRITTEN_BEFORE_READ = "overwritten_before_read"
    """A shared slot was written again before its reader was done."""
    STALE_ANSWER = "stale_answer"
    """An answer that was rung belongs to another step or layer."""
    WAIT_ENDED = "wait_ended"
    """A wait or a gate ended without what it waited for."""
    SHARED_INDEX_LEAK = "shared_index_leak"
    """A layer that shares its indices would attend to another step's selection."""
    NAN_SCORES = "nan_scores"
    """A row's scores hold NaN: those tokens were not chosen."""

    @property
    def cause(self) -> str:
        """The likely one."""
        return _ADVICE[self].cause

    @property
    def workaround(self) -> str:
        """What can be done today."""
        return _ADVICE[self].workaround


class _Advice(NamedTuple):
    cause: str
    workaround: str


_REWRITTEN = "a pinned staging buffer was rewritten while its copy to the GPU was pending"
_WAIT_FOR_COPY = (
    "wait for the copy's event before the buffer is used again, or give each step its own"
)

_ADVICE = {
    FindingKind.TORN_INPUT: _Advice(_REWRITTEN, _WAIT_FOR_COPY),
    FindingKind.BAD_QUERY_OFFSETS: _Advice(_REWRITTEN, _WAIT_FOR_COPY),
    FindingKind.BAD_LENGTH: _Advice(
        "the lengths were read before they were written, or " + _REWRITTEN, _WAIT_FOR_COPY
    ),
    FindingKind.BAD_POSITION: _Advice(
        "positions and lengths are of two steps: " + _REWRITTEN, _WAIT_FOR_COPY
    ),
    FindingKind.BAD_SLOT: _Advice(
        "the slot mapping is of another step: keys went to foreign pages",
        "do not trust the prefix cache from here on: reset it, then " + _WAIT_FOR_COPY,
    ),
    FindingKind.BAD_PAGE: _Advice(
        "the block table is of another step, or its pages were freed and used again",
        _WAIT_FOR_COPY,
    ),
    FindingKind.READ_BEFORE_WRITTEN: _Advice(
        "the reader did not wait until the writer's stream had published",
        "none needed for this layer, it was computed inline; report it: a gate was passed early",
    ),
    FindingKind.OVERWRITTEN_BEFORE_READ: _Advice(
        "the slot's owner went on before its reader was done",
        "more slots in a bank; if it comes again, a wait was left out",
    ),
    FindingKind.STALE_ANSWER: _Advice(
        "an older service or step still writes into the bank",
        "the layer was computed inline; restart the service, and keep banks retired until drained",
    ),
    FindingKind.WAIT_ENDED: _Advice(
        "the other side is dead, frozen or starved of the GPU",
        "see its log; without MPS two processes share a GPU by time slices: dsa-indexer doctor",
    ),
    FindingKind.SHARED_INDEX_LEAK: _Advice(
        "the layer that selects was skipped, or the buffer is another forward's",
        "the rows got -1; let the selecting layer run in every forward",
    ),
    FindingKind.NAN_SCORES: _Advice(
        "NaN or infinity in the queries, weights or K scales: often keys read before written",
        "look for earlier findings of the same request, and at the layer before this one",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One race, or one input that cannot be trusted.

    Attributes:
        step, epoch: of the plan; epoch 0 without an attachment.
        layer: id; None: all layers of the step.
        stage: span name of the stage that saw it ("dsa.gate"), where one is known.
        row: the first row concerned; None: the whole step.
        request: the engine's id of it, else "#" and its place in the batch; None: all of them.
        expected, seen: for people.
    """

    kind: FindingKind
    step: int
    epoch: int
    layer: int | None
    stage: str | None
    row: int | None
    request: str | None
    expected: str
    seen: str

    def __str__(self) -> str:
        where = [f"step {self.step}", f"epoch {self.epoch}"]
        where += [
            f"{name} {value}"
            for name, value in (
                ("layer", self.layer),
                ("stage", self.stage),
                ("row", self.row),
                ("request", self.request),
            )
            if value is not None
        ]
        return (
            f"{self.kind}: {', '.join(where)}: expected {self.expected}, seen {self.seen}; "
            f"likely cause: {self.kind.cause}; workaround: {self.kind.workaround}"
        )


class FindingListener(Protocol):
    """Is told of findings, on the thread that saw them."""

    def found(self, finding: Finding) -> None:
        """Must be quick and must not raise."""


class Findings:
    """Tells several listeners. One that raises is logged, and costs the others nothing."""

    def __init__(self, *listeners: FindingListener) -> None:
        self._listeners = listeners

    def found(self, finding: Finding) -> None:
        for listener in self._listeners:
            try:
                listener.found(finding)
            except Exception:
                logger.exception("a listener failed at %s", finding)


@dataclass
class _Told:
    at: float
    suppressed: int = 0


@dataclass
class FindingLog:
    """One line a finding, and of each kind one line in `quiet_seconds` at most; the next line
    says how many were left out. From any thread.
    """

    quiet_seconds: float = _QUIET_SECONDS
    clock: Callable[[], float] = time.monotonic
    _told: dict[FindingKind, _Told] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def found(self, finding: Finding) -> None:
        now = self.clock()
        with self._lock:
            told = self._told.get(finding.kind)
            if told is not None and now < told.at + self.quiet_seconds:
                told.suppressed += 1
                return
            self._told[finding.kind] = _Told(now)
        more = f" ({told.suppressed} more of this kind before)" if told and told.suppressed else ""
        logger.warning("%s%s", finding, more)

    def close(self) -> None:
        """Say what was left out since the last line of each kind."""
        with self._lock:
            told, self._told = self._told, {}
        for kind, last in told.items():
            if last.suppressed:
                logger.warning("%s: %d more of this kind were not logged", kind, last.suppressed)
