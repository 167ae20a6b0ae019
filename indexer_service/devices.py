"""What the service computes on: the CPU, or one GPU."""

from dataclasses import dataclass

import torch

from indexer_service.errors import StartError
from ipc_handoff import cuda_runtime as cuda
from ipc_handoff.errors import RegionError

_CPU, _AUTO = "cpu", "auto"


@dataclass(frozen=True)
class ServiceDevice:
    """One device, for the service's life.

    Attributes:
        ordinal: of the GPU in this process; None on the CPU.
        gpu_uuid: as nvidia-smi writes it; empty on the CPU.
    """

    ordinal: int | None = None
    gpu_uuid: str = ""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu" if self.ordinal is None else f"cuda:{self.ordinal}")


CPU = ServiceDevice()

MOST_GATE_SECONDS = 1.5
"""Of a gate on a GPU. Workers use a dead service's banks again after 2 s: its gates, which nobody
can end any more, must have ended by then."""


def service_device(setting: str) -> ServiceDevice:
    """The device that a setting names: "cpu", "cuda", "cuda:N", or "auto" (a GPU if there is one).

    Raises:
        StartError: it is not here.
    """
    if setting == _CPU or (setting == _AUTO and not cuda.device_count()):
        return CPU
    ordinal = int(setting.partition(":")[2] or 0)
    try:
        return ServiceDevice(ordinal, cuda.device_uuid(ordinal))
    except RegionError as error:
        raise StartError(str(error)) from None


def check_gate_bound(device: ServiceDevice, seconds: float) -> None:
    """Raise StartError for a gate bound that is too long for a GPU."""
    if device.ordinal is not None and seconds > MOST_GATE_SECONDS:
        raise StartError(
            f"gate_bound_seconds: {seconds} on a GPU (fix: {MOST_GATE_SECONDS} at most; workers "
            "use a dead service's banks again after 2 s)"
        )
