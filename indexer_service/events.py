"""What the runner tells whoever watches it. Telemetry listens; the runner does not know it."""

import logging
from collections.abc import Callable, Sequence

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from ipc_handoff.findings import Finding

logger = logging.getLogger(__name__)


class StepObserver:
    """Told of an attachment and its steps, on the runner's thread. By default does nothing.

    Also a `FindingListener`.
    """

    def attached(self, attachment: Attachment) -> None:
        """Steps may come now. Its memory must not be held beyond `ended`."""

    def step_finished(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        times: Sequence[Sequence[int]] | None,
        layers: Sequence[int],
    ) -> None:
        """A step's answers are out.

        Args:
            times: [layer ordinal][ServiceStage], nanoseconds; None if they were overwritten
                or the plan was refused.
            layers: the session's layer ids by ordinal.
        """

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

    def step_finished(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        times: Sequence[Sequence[int]] | None,
        layers: Sequence[int],
    ) -> None:
        for observer in self._observers:
            tell(
                observer,
                report.epoch,
                f"step {report.step}",
                lambda o: o.step_finished(plan, report, times, layers),
            )

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
