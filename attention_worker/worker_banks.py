"""Banks of which the worker's own kernels may still use the memory."""

from typing import cast

import torch
from torch import Tensor

from attention_worker.device_stamps import DeviceStampRing, SideReader
from attention_worker.streams import new_event
from ipc_handoff.banks import ANSWERS
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.device_layout import DEVICE_STAMPED_STEPS
from ipc_handoff.kernels.clock import HostsClock
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import TensorSpec
from ipc_handoff.stages import SERVICE_STAGES
from ipc_handoff.stamps import StampRing, StepTimes
from ipc_handoff.words import WORD_BYTES


class ServiceStamps(DeviceStampRing):
    """The service's stamps in a bank: readable when the service is dead, on the host's clock.

    Args:
        blocks, layers, stages, reader: as for `DeviceStampRing`; the memory is the worker's.
        stamped_by: reads the clock of the GPU whose kernels stamped: the service's.
    """

    def __init__(
        self, blocks: Tensor, layers: int, stages: int, reader: SideReader, stamped_by: SideReader
    ) -> None:
        super().__init__(blocks, layers, stages, reader)
        self._clock = HostsClock(stamped_by.clock)

    def read(self, step: int) -> StepTimes | None:
        times = super().read(step)
        return None if times is None else self._clock.of(times)


class WorkerBank(DeviceBank):
    """A bank that begins anew only behind what the worker's stream was told to do with it.

    The pool knows when the *service* is done with a bank. Kernels of the worker that were enqueued
    for an ended attachment still stage into it, and ring in it.
    """

    def __init__(
        self, geometry: HandoffGeometry, number: int, staging_device: int, answers_device: int
    ) -> None:
        super().__init__(geometry, number, staging_device, answers_device)
        self._used = new_event()
        layout = geometry.device
        blocks = TensorSpec((DEVICE_STAMPED_STEPS, layout.stamp_stride // WORD_BYTES), torch.int64)
        stamps = ServiceStamps(
            self.memories[ANSWERS].tensor(layout.stamps, blocks.byte_size, blocks, "stamps"),
            len(geometry.layers),
            len(SERVICE_STAGES),
            SideReader(torch.device("cuda", answers_device)),
            SideReader(torch.device("cuda", staging_device)),
        )
        # Where a dead service's stages are looked for, whatever memory they lie in.
        self.control.service_stamps = cast(StampRing, stamps)

    def mark(self) -> None:
        """Everything on the current stream so far may use the bank. Never waits."""
        self._used.record()

    def start(self, epoch: int) -> None:
        self._used.synchronize()
        super().start(epoch)
