"""Banks in device memory (worker's side): staging and answers each on the GPU that reads it."""

from ipc_handoff import cuda_runtime as cuda
from ipc_handoff.banks import ANSWERS, CONTROL, STAGING, Bank, control_memory
from ipc_handoff.control import WorkerControl
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.layout import HandoffGeometry


class DeviceBank(Bank):
    """One bank; the control block stays in host memory.

    Each region is a CUDA allocation of its own: a handle exposes its whole allocation.

    Args:
        staging_device: ordinal of the service's GPU.
        answers_device: ordinal of the worker's GPU. Its kernels may use `staging` too.

    Attributes:
        staging_address, answers_address: of the regions' first bytes in this process; what lies
            where says `geometry.device`.

    Raises:
        RegionError: no memory, or no way from one GPU to the other.
    """

    def __init__(
        self, geometry: HandoffGeometry, number: int, staging_device: int, answers_device: int
    ) -> None:
        self.number = number
        self._layout = geometry.device
        if staging_device != answers_device:
            cuda.enable_peer_access(answers_device, staging_device)
        self._staging = CudaMemory.allocate(
            self._layout.staging_size, staging_device, f"{STAGING}{number}"
        )
        self._answers = CudaMemory.allocate(
            self._layout.answers_size, answers_device, f"{ANSWERS}{number}"
        )
        control = control_memory(geometry, number)
        self.memories = {CONTROL: control, STAGING: self._staging, ANSWERS: self._answers}
        self.control = WorkerControl(control.view(), geometry)
        self.staging_address = self._staging.pointer
        self.answers_address = self._answers.pointer

    def start(self, epoch: int) -> None:
        self.clear()
        self.control.start(epoch)

    def clear(self) -> None:
        """Zero every word and stamp in device memory, and wait for it; slots stay as they are."""
        layout = self._layout
        cuda.zero(self._staging.device, self.staging_address, layout.staging_slots)
        cuda.zero(self._answers.device, self.answers_address, layout.answers_slots)
        cuda.zero(
            self._answers.device,
            self.answers_address + layout.stamps,
            layout.answers_size - layout.stamps,
        )
