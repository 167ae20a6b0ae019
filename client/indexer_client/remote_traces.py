"""Traces of steps that the service worked on, for the case that it dies with its part of them."""

import logging
from collections import deque

from indexer_client.telemetry import lost_service_stages
from ipc_handoff.control import WorkerControl
from ipc_handoff.layout import STAMPED_STEPS, HandoffGeometry
from ipc_handoff.tracing import StepTrace

logger = logging.getLogger(__name__)


class RemoteTraces:
    """Of one attachment. The step thread adds; once it has left, another one may export.

    A service tells in the word `exported` up to which step its spans have left it. Its stamps lie
    in the shared block, which outlives it.
    """

    def __init__(self, geometry: HandoffGeometry, epoch: int) -> None:
        self._geometry = geometry
        self._epoch = epoch
        # Stamps of older steps are overwritten.
        self._steps: deque[tuple[int, StepTrace]] = deque(maxlen=STAMPED_STEPS)

    def add(self, step: int, trace: StepTrace) -> None:
        """A step whose stages the service will export."""
        self._steps.append((step, trace))

    def export(self, control: WorkerControl) -> int:
        """Export, as incomplete, what the dead service did not; how many steps' stamps are lost.

        Raises nothing.
        """
        before = control.service_stamps.lost
        try:
            exported = control.bells.exported()
            for step, trace in self._steps:
                times = control.service_stamps.read(step) if step > exported else None
                if times is not None:
                    lost_service_stages(trace, self._geometry, step, self._epoch, times)
        except Exception:
            logger.exception("epoch %d: a dead service's stages are not exported", self._epoch)
        self._steps.clear()
        return control.service_stamps.lost - before
