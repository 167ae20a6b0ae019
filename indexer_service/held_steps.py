"""One attachment's traced steps: those that are kept, and those that nobody has decided about."""

from collections import deque
from dataclasses import dataclass, field

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.events import FinishedStep
from ipc_handoff.doorbells import ServiceBells
from ipc_handoff.findings import Finding
from ipc_handoff.layout import HELD_STEPS
from ipc_handoff.stages import SERVICE_SPANS
from ipc_handoff.telemetry.attributes import Attributes
from ipc_handoff.telemetry.step_trace import SAMPLED
from ipc_handoff.telemetry.tracing import Tracing


@dataclass
class TracedStep:
    """A step that is over.

    Attributes:
        attributes: of its spans.
        is_exported: its spans were made; what is found now gets a span of its own.
    """

    finished: FinishedStep
    attributes: Attributes
    findings: list[Finding] = field(default_factory=list)
    is_exported: bool = False

    @property
    def number(self) -> int:
        return self.finished.plan.step

    @property
    def context(self) -> pb.TraceContext:
        return self.finished.plan.trace


class HeldSteps:
    """Not thread-safe: its owner keeps calls apart.

    Attributes:
        exported: steps whose spans were made, and have perhaps not left yet.
        kept, dropped: how many.
    """

    def __init__(self, tracing: Tracing, bells: ServiceBells) -> None:
        self._tracing = tracing
        self.bells = bells
        self._steps: deque[TracedStep] = deque()
        # Of steps that are not over, or never traced.
        self._early: dict[int, list[Finding]] = {}
        self.exported: list[int] = []
        self.kept = self.dropped = 0

    def found(self, finding: Finding) -> None:
        """Of a step that runs, or of one of the newest."""
        for held in self._steps:
            if held.number == finding.step:
                held.findings.append(finding)
                self._decide(held)
                return
        self._early.setdefault(finding.step, []).append(finding)
        while len(self._early) > HELD_STEPS:
            del self._early[next(iter(self._early))]

    def forget(self, step: int) -> None:
        """A step that is over and was never traced."""
        self._early.pop(step, None)

    def add(self, step: TracedStep, keep: bool) -> None:
        """A step that is over.

        Args:
            keep: for what happened in it.
        """
        step.findings += self._early.pop(step.number, [])
        self._steps.append(step)
        self._decide(step, keep)
        while len(self._steps) > HELD_STEPS:
            oldest = self._steps.popleft()
            self._decide(oldest)
            self.dropped += not oldest.is_exported

    def settle(self) -> None:
        """Export what the worker wants kept by now."""
        for held in self._steps:
            self._decide(held)

    def end(self) -> None:
        """The last look; what nobody wants by now is dropped."""
        self.settle()
        self.dropped += sum(not held.is_exported for held in self._steps)
        self._steps.clear()

    def _decide(self, held: TracedStep, keep: bool = False) -> None:
        if held.is_exported:
            self._tracing.finding_span(held.context, held.findings, held.attributes)
            held.findings = []
            return
        is_sampled = bool(held.context.flags & SAMPLED)
        if keep or held.findings:
            if not is_sampled:
                self.bells.keep(held.number)
        elif not (is_sampled or self.bells.is_kept(held.number)):
            return
        self._export(held)

    def _export(self, held: TracedStep) -> None:
        left = held.findings
        if held.finished.times:
            left = self._tracing.stage_spans(
                held.context,
                SERVICE_SPANS,
                held.finished.times,
                held.finished.layers,
                held.attributes,
                findings=held.findings,
            )
            self.exported.append(held.number)
        self._tracing.finding_span(held.context, left, held.attributes)
        held.findings, held.is_exported = [], True
        self.kept += 1
