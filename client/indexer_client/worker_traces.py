"""The worker's traced steps: spans of those that are kept, nothing of the others.

A step is kept if it was sampled, if it was slow, lost its service or failed, if something was
found in it, or if the service wants it. Either side may say so until the other one has dropped
its part, 32 steps later.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from indexer_client.attachment import Attachment
from indexer_client.inputs import StepInputs
from indexer_client.telemetry import begun_attributes, export_step
from ipc_handoff.findings import Finding
from ipc_handoff.layout import HELD_STEPS, STAMPED_STEPS, HandoffGeometry
from ipc_handoff.telemetry.attributes import Attributes, Times
from ipc_handoff.telemetry.step_trace import StepTrace
from ipc_handoff.telemetry.tracing import Tracing

_NANOSECONDS = 1e9
_SETTLED_STEPS = 8
"""So often all undecided steps are looked at: well within `HELD_STEPS`."""


class StampReader(Protocol):
    """Where the times of the worker's stages are."""

    def read(self, step: int) -> Times | None:
        """Of a step that is over, [layers][WorkerStage] by the host's clock; None: overwritten."""


@dataclass(frozen=True)
class EndedStep:
    """A step that is over.

    Attributes:
        attachment: that it had; None: it was inline.
        of_layers: attributes of a layer's spans.
        is_stamped: its stages have times.
    """

    number: int
    trace: StepTrace
    attachment: Attachment | None
    of_layers: dict[int, Attributes] = field(default_factory=dict)
    is_stamped: bool = True

    @property
    def is_wanted(self) -> bool:
        """Somebody wants it kept."""
        if self.trace.is_kept:
            return True
        return self.attachment is not None and self.attachment.bells.is_kept(self.number)


class WorkerTraces:
    """Steps begin on one thread and end on one thread; `found` may be called on any.

    Args:
        stamps: of the worker; None: nothing is stamped.

    Attributes:
        kept, dropped: steps of which spans were made, and of which none were.
    """

    def __init__(
        self,
        tracing: Tracing,
        geometry: HandoffGeometry,
        stamps: StampReader | None,
    ) -> None:
        self._tracing = tracing
        self._geometry = geometry
        self._stamps = stamps
        self._newest: dict[int, StepTrace] = {}
        self._held: deque[EndedStep] = deque()
        self._last_end = 0
        self._was_found = False
        self._lock = threading.Lock()
        self.kept = self.dropped = 0

    def begin(self, number: int, inputs: StepInputs) -> StepTrace:
        """A step that begins now. Takes no lock: it is on the hot path."""
        trace = self._tracing.begin_step(begun_attributes(number, inputs))
        self._newest[number] = trace
        self._newest.pop(number - STAMPED_STEPS, None)
        return trace

    def found(self, finding: Finding) -> None:
        trace = self._newest.get(finding.step)
        if trace is None:
            return
        with self._lock:
            if trace.is_exported:
                self._tracing.finding_span(trace.context, [finding], {"dsa.step": finding.step})
            else:
                trace.found(finding)
                self._was_found = True

    def end(self, step: EndedStep) -> None:
        """A step whose trace has ended; its stamps are there."""
        trace, slow = step.trace, self._tracing.slow_seconds
        # On a GPU steps are begun far ahead: a step has not begun before the last one is over.
        took = trace.ended - max(trace.began, self._last_end)
        self._last_end = trace.ended
        if slow is not None and took > slow * _NANOSECONDS:
            trace.keep()
        self._held.append(step)
        # Looking at all of them takes longer than all the rest.
        if step.is_wanted or self._was_found or step.number % _SETTLED_STEPS == 0:
            self.settle()

    def settle(self) -> None:
        """Make the spans of what is wanted by now; drop what nobody can want any more."""
        self._was_found = False
        for step in [held for held in self._held if held.is_wanted]:
            self._held.remove(step)
            self._export(step)
        while len(self._held) > HELD_STEPS:
            self._held.popleft()
            self.dropped += 1

    def close(self) -> None:
        """The last look."""
        self.settle()
        self.dropped += len(self._held)
        self._held.clear()

    def _export(self, step: EndedStep) -> None:
        trace, attachment = step.trace, step.attachment
        # Of a sampled step the plan has said so.
        if attachment is not None and not trace.is_sampled:
            attachment.bells.keep(step.number)
        times: Times | None = ()
        if self._stamps is not None and step.is_stamped:
            times = self._stamps.read(step.number)
        with self._lock:
            export_step(trace, self._geometry, step.number, attachment, times, step.of_layers)
        self.kept += 1
