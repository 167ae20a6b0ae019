"""Traces of steps that the service worked on, for the case that it dies with its part of them."""

import logging
from collections import deque

from ipc_handoff.control import WorkerControl
from ipc_handoff.layout import STAMPED_STEPS, HandoffGeometry
from ipc_handoff.stages import SERVICE_SPANS
from ipc_handoff.stamps import StepTimes
from ipc_handoff.telemetry.attributes import Times
from ipc_handoff.telemetry.step_trace import StepTrace

logger = logging.getLogger(__name__)


class RemoteTraces:
    """Of one attachment. The step thread adds; once it has left, another one may export.

    A service marks each step whose spans have left it in the words `exported`. Its stamps lie in
    the shared block, which outlives it.
    """

    def __init__(self, geometry: HandoffGeometry, epoch: int) -> None:
        self._geometry = geometry
        self._epoch = epoch
        # Stamps of older steps are overwritten.
        self._steps: deque[tuple[int, StepTrace]] = deque(maxlen=STAMPED_STEPS)

    def add(self, step: int, trace: StepTrace) -> None:
        """A step whose stages the service will export if it is kept."""
        self._steps.append((step, trace))

    def export(self, control: WorkerControl) -> int:
        """Export, as incomplete, what the dead service did not; how many steps' stamps are lost.

        Raises nothing.
        """
        before = control.service_stamps.lost
        try:
            for step, trace in self._steps:
                is_kept = trace.is_kept or control.bells.is_kept(step)
                if not is_kept or control.bells.is_exported(step):
                    continue
                if (times := control.service_stamps.read(step)) is not None:
                    lost_service_stages(trace, self._geometry, step, self._epoch, times)
        except Exception:
            logger.exception("epoch %d: a dead service's stages are not exported", self._epoch)
        self._steps.clear()
        return control.service_stamps.lost - before


def lost_service_stages(
    trace: StepTrace, geometry: HandoffGeometry, step: int, epoch: int, times: Times
) -> None:
    """Export the stages of a service that will not do it any more.

    Args:
        times: [layer ordinal][ServiceStage].
    """
    attributes = {"dsa.step": step, "dsa.epoch": epoch}
    if isinstance(times, StepTimes) and times.clock_error is not None:
        attributes["dsa.clock_error_ns"] = times.clock_error
    trace.stages(SERVICE_SPANS, times, geometry.layers, attributes, incomplete=True)
