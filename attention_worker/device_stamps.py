"""Stage stamps in device memory, read off the hot path.

Reading waits for the reader's own stream, never for the one that runs steps: what steps write
meanwhile is told by generations.
"""

import torch
from torch import Tensor

from attention_worker.captures import beside_captures
from attention_worker.streams import new_event, side_stream
from ipc_handoff.kernels.clock import ClockOffset, clock_offset
from ipc_handoff.stamps import StepTimes


class SideReader:
    """Copies of device memory, made beside the running step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device) if device.type == "cuda" else None

    def copies(self, *tensors: Tensor) -> list[Tensor]:
        """On the host, one after the other; waits for them."""
        if self._stream is None:
            return [tensor.clone() for tensor in tensors]
        with beside_captures(), torch.cuda.stream(self._stream):
            copies = []
            for tensor in tensors:
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            done = new_event()
            done.record()
            done.synchronize()
        return copies

    def clock(self) -> ClockOffset:
        """Of the device's clock; waits."""
        if self._stream is None:
            return clock_offset(self._device)
        with beside_captures(), torch.cuda.stream(self._stream):
            return clock_offset(self._device)


class DeviceStampRing:
    """As `stamps.StampRing`, of which only the reader is here; times are the GPU's.

    Args:
        blocks: int64 [steps, n]: of each step the generation, then a time a layer and stage.
        layers, stages: how many of each.

    Attributes:
        lost: steps whose stamps were overwritten before they were read.
    """

    def __init__(self, blocks: Tensor, layers: int, stages: int, reader: SideReader) -> None:
        self._blocks, self._reader = blocks, reader
        self._stages, self._cells = stages, layers * stages
        self.lost = 0

    def read(self, step: int) -> StepTimes | None:
        """Times [layers][stages] of a step, or None (and counted) if it has none."""
        block = self._blocks[step % len(self._blocks)]
        # The generation once more, behind the copy.
        copied, generation = self._reader.copies(block[: 1 + self._cells], block[:1])
        if int(copied[0]) != step or int(generation[0]) != step:
            self.lost += 1
            return None
        return StepTimes.of_cells(copied[1:].tolist(), self._stages)
