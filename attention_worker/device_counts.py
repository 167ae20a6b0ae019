"""What the worker's kernels have counted and stamped, read off the hot path."""

from attention_worker.device_stamps import DeviceStampRing, SideReader
from ipc_handoff.kernels.clock import ClockOffset
from ipc_handoff.kernels.words import Told, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WORKER_STAGES
from ipc_handoff.stamps import StepTimes


class DeviceCounts:
    """Args:
    memory: of the worker.
    """

    def __init__(self, memory: WorkerMemory) -> None:
        self._memory = memory
        self._reader = SideReader(memory.device)
        layers = len(memory.geometry.layers)
        self._stamps = DeviceStampRing(memory.stamps, layers, len(WORKER_STAGES), self._reader)

    @property
    def lost(self) -> int:
        """Steps whose stamps were overwritten before they were read."""
        return self._stamps.lost

    def layers(self) -> tuple[int, int]:
        """Layers that the service answered, and layers of published steps that it did not."""
        (state,) = self._reader.copies(self._memory.state)
        return int(state[WorkerState.ANSWERED]), int(state[WorkerState.INLINE])

    def cancelled_steps(self) -> int:
        """Steps that the service gave up."""
        return int(self._memory.told[Told.CANCELLED])

    def stamps(self, step: int) -> StepTimes | None:
        """Times [layers][WorkerStage] of a step, ns of the GPU's clock; 0: not reached.

        None (and counted) if another step took their place, or the step was never published.
        """
        return self._stamps.read(step)

    def clock(self) -> ClockOffset:
        """Of the GPU's clock now; waits."""
        return self._reader.clock()
