"""What the worker's kernels have counted and stamped, read off the hot path.

Reading waits for the reader's own stream, never for the one that runs steps: what steps write
meanwhile is told by generations, or only grows.
"""

from collections.abc import Callable

import torch

from attention_worker.captures import beside_captures
from attention_worker.streams import new_event, side_stream
from ipc_handoff.kernels.words import Told, WorkerState
from ipc_handoff.kernels.worker_memory import STAMPED_STEPS, WorkerMemory
from ipc_handoff.stages import WORKER_STAGES
from ipc_handoff.stamps import StepTimes


class DeviceCounts:
    """Args:
        memory: of the worker.

    Attributes:
        lost: steps whose stamps were overwritten before they were read.
    """

    def __init__(self, memory: WorkerMemory) -> None:
        self._memory = memory
        self._stream = side_stream(memory.device) if memory.is_cuda else None
        self.lost = 0

    def layers(self) -> tuple[int, int]:
        """Layers that the service answered, and layers of published steps that it did not."""
        (state,) = self._read(lambda: [self._memory.state])
        return int(state[WorkerState.ANSWERED]), int(state[WorkerState.INLINE])

    def cancelled_steps(self) -> int:
        """Steps that the service gave up."""
        return int(self._memory.told[Told.CANCELLED])

    def stamps(self, step: int) -> StepTimes | None:
        """Times [layers][WorkerStage] of a step, ns of the GPU's clock; 0: not reached.

        None (and counted) if another step took their place, or the step was never published.
        """
        block = self._memory.stamps[step % STAMPED_STEPS]
        # The generation once more, behind the copy.
        copied, generation = self._read(lambda: [block, block[:1]])
        if int(copied[0]) != step or int(generation[0]) != step:
            self.lost += 1
            return None
        cells, stages = copied[1:].tolist(), len(WORKER_STAGES)
        return StepTimes((cells[i : i + stages] for i in range(0, len(cells), stages)), None)

    def _read(self, tensors: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        if self._stream is None:
            return [tensor.clone() for tensor in tensors()]
        with beside_captures(), torch.cuda.stream(self._stream):
            copies = []
            for tensor in tensors():
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            done = new_event()
            done.record()
            done.synchronize()
        return copies
