"""Banks of which the worker's own kernels may still use the memory."""

from attention_worker.streams import new_event
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.layout import HandoffGeometry


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

    def mark(self) -> None:
        """Everything on the current stream so far may use the bank. Never waits."""
        self._used.record()

    def start(self, epoch: int) -> None:
        self._used.synchronize()
        super().start(epoch)
