"""A host with GPUs for `dsa-indexer doctor`, on a CPU."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer_cli import doctor_gpus, doctor_handoff, doctor_placement
from dsa_indexer_cli.doctor_finding import Finding
from dsa_indexer_cli.gpu_facts import GpuFacts, collect
from tests.support.fake_cuda import OK, Machine, Process, running_as
from tests.support.fake_cuda_names import CUresult

MEASURED = {
    "microseconds_a_layer": 3.25,
    "worst_microseconds_a_layer": 9.5,
    "layers": 16,
    "steps": 12,
}


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133


class AskedProcess(Process):
    """A process that also asks for what people want to know of a GPU."""

    CUdevice_attribute: Any = Attribute
    cuda = 13000
    capability = (9, 0)

    def cuDriverGetVersion(self) -> tuple[CUresult, int]:
        return OK, self.cuda

    def cuDeviceGetName(self, length: int, device: int) -> tuple[CUresult, bytes]:
        return OK, f"NVIDIA H{device}".encode().ljust(length, b"\0")

    def cuDeviceTotalMem(self, device: int) -> tuple[CUresult, int]:
        return OK, 140 << 30

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[CUresult, int]:
        if attribute == Attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
            return super().cuDeviceGetAttribute(attribute, device)
        is_minor = attribute == Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        return OK, self.capability[is_minor]


@dataclass
class GpuHost:
    """Attributes:
    process: what the driver says.
    versions: of installed packages.
    pipes: CUDA_MPS_PIPE_DIRECTORY.
    measured: pairs of GPUs that the hand-over was measured between.
    """

    process: AskedProcess
    versions: dict[str, str]
    pipes: Path
    measured: list[tuple[int, int]] = field(default_factory=list)

    def findings(self) -> dict[str, Finding]:
        """By check, of which none comes twice."""
        found = doctor_placement.placement_findings()
        assert len({finding.check for finding in found}) == len(found)
        return {finding.check: finding for finding in found}

    def measure(
        self, worker_gpu: int, service_gpu: int, seconds: float, *, sleeps: bool = False
    ) -> dict[str, Any]:
        assert 0 < seconds <= doctor_handoff.PROBE_SECONDS
        self.measured.append((worker_gpu, service_gpu))
        assert sleeps == (worker_gpu == service_gpu and not self.process.machine.mps)
        return MEASURED


@contextmanager
def gpu_host(tmp_path: Path, patch: pytest.MonkeyPatch, **machine: Any) -> Iterator[GpuHost]:
    """`machine`: see `Machine`."""
    made = Machine(**machine)
    process = AskedProcess(made, 100, visible=tuple(range(made.gpus)))
    versions = {"cuda-bindings": "13.0.3", "triton": "3.6.0"}
    host = GpuHost(process, versions, tmp_path / "pipes")
    for variable in (
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):
        patch.delenv(variable, raising=False)
    patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(host.pipes))
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(doctor_gpus, "_version", lambda package: versions.get(package, ""))
    patch.setattr(doctor_placement, "has_device_files", lambda: True)
    patch.setattr(doctor_placement, "look", lambda: _over_json(collect()))
    patch.setattr(doctor_handoff, "measure", host.measure)
    with running_as(process):
        yield host


def _over_json(facts: GpuFacts) -> GpuFacts:
    return GpuFacts.of_json(json.loads(json.dumps(asdict(facts))))
