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
