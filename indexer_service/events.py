"""What the runner tells whoever watches it. Telemetry listens; the runner does not know it."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from ipc_handoff.findings import Finding
from ipc_handoff.telemetry.attributes import Times

logger = logging.getLogger(__name__)


class FinishedStep(NamedTuple):
    """A step that was answered, given up or refused, and reported.

    Attributes:
        times: [layer ordinal][ServiceStage], ns of CLOCK_MONOTONIC; None if they were overwritten,
            () if there are none: nobody wanted them, or it was refused or given up at once.
        layers: the session's layer ids by ordinal.
    """

    plan: pb.StepPlan
    report: pb.StepReport
    times: Times | None
    layers: Sequence[int]


class StepObserver:
    """Told of an attachment and its steps, on the runner's thread. By default does nothing.

    Also a `FindingListener`.
    """

    def attached(self, attachment: Attachment) -> None:
        """Steps may come now. Its memory must not be held beyond `ended`."""

    def step_finished(self, step: FinishedStep) -> None:
        """A step's report is out, and whatever answers it has."""

    def ended(self, epoch: int) -> None:
        """No step will come; told before the worker may use the memory again."""

    def found(self, finding: Finding) -> None:
        """A detector's finding in a step, before or after `step_finished`; on any thread."""


class StepObservers(StepObserver):
    """Tells several. What one raises costs the others nothing."""

    def __init__(self, *observers: StepObserver) -> None:
        self._observers = observers

    def attached(self, attachment: Attachment) -> None:
        for observer in self._observers:
            tell(observer, attachment.epoch, "attached", lambda o: o.attached(attachment))

    def step_finished(self, step: FinishedStep) -> None:
        epoch, what = step.report.epoch, f"step {step.report.step}"
        for observer in self._observers:
            tell(observer, epoch, what, lambda o: o.step_finished(step))

    def ended(self, epoch: int) -> None:
        for observer in self._observers:
            tell(observer, epoch, "ended", lambda o: o.ended(epoch))

    def found(self, finding: Finding) -> None:
        for observer in self._observers:
            tell(observer, finding.epoch, "found", lambda o: o.found(finding))


def tell(
    observer: StepObserver | None, epoch: int, what: str, call: Callable[[StepObserver], None]
) -> None:
    """Call an observer, if there is one. What it raises is logged, and disturbs no step."""
    if observer is None:
        return
    try:
        call(observer)
    except Exception:
        logger.exception("epoch %d, %s: the observer failed", epoch, what)
