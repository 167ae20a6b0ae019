"""The worker's part of a step's trace, from the step's begin until it is exported or dropped."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.findings import Finding
from ipc_handoff.stages import FINDING_EVENT, StageSpan
from ipc_handoff.telemetry.attributes import Attributes, Times, finding_attributes

if TYPE_CHECKING:
    from ipc_handoff.telemetry.tracing import Tracing

SAMPLED = 1
"""Bit of the trace flags: kept, whatever happens in the step."""

_LOOKS = 3


class StepTrace:
    """The worker's part of one step's trace; all of its times are told by one clock.

    Attributes:
        context: goes into the plan.
        attributes: of the step's span; more may be added until it is exported.
        offset: wall time minus monotonic time, ns.
        began, ended: monotonic ns; ended is 0 until it has.
        error: what ended the step, if it did not end well.
        findings: that no stage's span has taken.
        is_kept: its spans are wanted.
        is_exported: they were made.
    """

    def __init__(
        self, tracing: "Tracing", context: pb.TraceContext, attributes: Attributes
    ) -> None:
        self._tracing = tracing
        self.context = context
        self.attributes = dict(attributes)
        self.offset = wall_offset()
        self.began, self.ended = time.monotonic_ns(), 0
        self.events: list[tuple[str, Attributes, int]] = []
        self.error: BaseException | None = None
        self.findings: list[Finding] = []
        self.is_kept = bool(context.flags & SAMPLED)
        self.is_exported = False

    @property
    def trace_id(self) -> str:
        return self.context.trace_id.hex()

    @property
    def is_sampled(self) -> bool:
        """It is kept whatever happens, and the plan says so."""
        return bool(self.context.flags & SAMPLED)

    def keep(self) -> None:
        self.is_kept = True

    def found(self, finding: Finding) -> None:
        """From any thread."""
        self.findings.append(finding)
        self.is_kept = True

    def stages(
        self,
        spans: Sequence[StageSpan],
        times: Times,
        layers: Sequence[int],
        attributes: Attributes,
        *,
        incomplete: bool = False,
        of_layers: Mapping[int, Attributes] | None = None,
    ) -> None:
        """See `Tracing.stage_spans`; of a trace that is kept. Also after `export`."""
        self.findings = self._tracing.stage_spans(
            self.context,
            spans,
            times,
            layers,
            attributes,
            offset=self.offset,
            incomplete=incomplete,
            of_layers=of_layers,
            findings=self.findings,
        )

    def event(self, name: str, attributes: Attributes) -> None:
        """Something that happens now, or is known only when the step is over."""
        self.events.append((name, attributes, self.ended or time.monotonic_ns()))

    def end(self, error: BaseException | None = None) -> None:
        """The step is over; an error keeps it."""
        self.ended = time.monotonic_ns()
        self.error = error
        self.is_kept |= error is not None

    def export(self) -> None:
        """Make the step's span, with the findings that are left."""
        self.is_exported = True
        findings, self.findings = self.findings, []
        for finding in findings:
            self.events.append((FINDING_EVENT, finding_attributes(finding), self.ended))
        self._tracing.step_span(self)
        self.error = None  # it leads to the frames of the step


def wall_offset() -> int:
    """Wall time minus monotonic time, ns: stamps are the one, spans the other.

    Looked at anew for each step, since wall time may be set. The closest look counts.
    """
    looks = []
    for _ in range(_LOOKS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]
