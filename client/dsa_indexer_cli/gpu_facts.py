"""What the CUDA driver says of this host's GPUs: `python -m dsa_indexer_cli.gpu_facts`.

A process of its own, since the driver may hang: a client of another user's MPS daemon waits.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ipc_handoff import cuda_runtime
from ipc_handoff.errors import RegionError

_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """Attributes:
    ordinal: in a process with this one's CUDA_VISIBLE_DEVICES.
    uuid: as nvidia-smi writes it.
    capability: compute capability, major and minor.
    memory_bytes: of all its memory.
    under_mps: whether an MPS daemon serves it.
    peers: ordinals of the GPUs that it and that it can be reached from.
    """

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    under_mps: bool
    peers: tuple[int, ...]


@dataclass(frozen=True)
class GpuFacts:
    """Attributes:
    cuda: the newest version of CUDA that the driver runs, major and minor.
    gpus: every visible one, by ordinal.
    """

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "GpuFacts":
        gpus = [
            Gpu(**{**gpu, "capability": tuple(gpu["capability"]), "peers": tuple(gpu["peers"])})
            for gpu in fields["gpus"]
        ]
        return cls(tuple(fields["cuda"]), tuple(gpus))


def collect() -> GpuFacts:
    """Ask the driver.

    Raises:
        RegionUnavailable: it cannot be asked; names what is missing and the fix.
    """
    cuda_runtime.runs_under_mps(0)  # Unlike the count below, it says why there is no GPU.
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    count = cuda_runtime.device_count()
    return GpuFacts(
        (version // 1000, version % 1000 // 10),
        tuple(_gpu(driver, ordinal, count) for ordinal in range(count)),
    )


def _gpu(driver: Any, ordinal: int, count: int) -> Gpu:
    attributes = driver.CUdevice_attribute
    _, device = driver.cuDeviceGet(ordinal)
    _, name = driver.cuDeviceGetName(_NAME_BYTES, device)
    _, memory_bytes = driver.cuDeviceTotalMem(device)
    _, major = driver.cuDeviceGetAttribute(
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
    )
    _, minor = driver.cuDeviceGetAttribute(
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device
    )
    return Gpu(
        ordinal,
        cuda_runtime.device_uuid(ordinal),
        name.split(b"\0")[0].decode(),
        (int(major), int(minor)),
        int(memory_bytes),
        cuda_runtime.runs_under_mps(ordinal),
        tuple(
            other
            for other in range(count)
            if other != ordinal
            and cuda_runtime.can_access_peer(ordinal, other)
            and cuda_runtime.can_access_peer(other, ordinal)
        ),
    )


def main() -> None:
    try:
        print(json.dumps(asdict(collect())))
    except (RegionError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
