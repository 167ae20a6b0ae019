"""The hand-over probe's two sides as processes without a GPU, in Triton's interpreter.

`python -m tests.cli.interpreted_probe STEPS ADDEND`: the worker's output, for a service that adds
ADDEND where the worker expects 1. Host memory that both have stands for the bank's; graphs are the
calls that they would have captured.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_indexer_cli import handoff_probe
from ipc_handoff.cuda_regions import CudaExport
from ipc_handoff.device import word
from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.regions import TensorSpec

GEOMETRY = handoff_probe.GEOMETRY
LONGEST_SECONDS = 240
SIZES = {"staging": GEOMETRY.device.staging_size, "answers": GEOMETRY.device.answers_size}


@triton.jit
def plain_look(address, PTX: tl.constexpr):
    """The interpreter's atomics are atomic within a process: its own `look` would add 0 to a word,
    and undo what the other process rings meanwhile."""
    return tl.load(word(address), volatile=True)


def _shared(size: int) -> Tensor:
    whole = torch.zeros(size + DEVICE_LINE, dtype=torch.uint8).share_memory_()
    begin = -whole.data_ptr() % DEVICE_LINE
    return whole[begin : begin + size]


REGIONS = {name: _shared(size) for name, size in SIZES.items()}


class Memory:
    """Stands for `CudaMemory`; its handle is the region's name."""

    def __init__(self, name: str) -> None:
        self._region = REGIONS[name]
        self.pointer = self._region.data_ptr()
        self.export = CudaExport(name.encode(), 0, len(self._region), "GPU-0", 1)

    @classmethod
    def open(cls, export: CudaExport, *, owner: str, device: int, field_name: str) -> "Memory":
        assert owner and export.handle.decode() == field_name
        return cls(field_name)

    def tensor(self, offset: int, byte_size: int, spec: TensorSpec, field_name: str) -> Tensor:
        return self._region[offset : offset + byte_size].view(spec.dtype).view(spec.shape)


class Bank:
    def __init__(self, *arguments: object, **devices: int) -> None:
        self.memories = {name: Memory(name) for name in REGIONS}
        self.staging_address = self.memories["staging"].pointer
        self.answers_address = self.memories["answers"].pointer


class Graph:
    def __init__(self, body: Callable[[], None]) -> None:
        body()
        self.replay = body


class Stream:
    def synchronize(self) -> None:
        pass


class Event(Stream):
    def record(self) -> None:
        self.time = time.monotonic()

    def elapsed_time(self, other: "Event") -> float:
        return (other.time - self.time) * 1000


class OnTheCpu:
    """torch, as on a host whose GPU is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *which: object) -> torch.device:
        return torch.device("cpu")

    def arange(self, *numbers: int, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.arange(*numbers, **options)


def main(steps: int, addend: int) -> int:
    torch.set_num_threads(1)
    for kernel in ("gate", "wait"):
        module: Any = importlib.import_module(f"ipc_handoff.kernels.{kernel}")
        assert module.look
        module.look = plain_look
    replaced = {
        "torch": OnTheCpu(),
        "CudaMemory": Memory,
        "DeviceBank": Bank,
        "_captured": Graph,
        "_stream_on": lambda ordinal: Stream(),
        "_new_event": Event,
        "_STEPS": steps,
    }
    for name, value in replaced.items():
        setattr(handoff_probe, name, value)
    ours, theirs = socket.socketpair()
    service = os.fork()
    signal.alarm(LONGEST_SECONDS)  # Nobody polls for ever.
    if service == 0:
        ours.close()
        sys.stdout = sys.stderr
        handoff_probe._answer = lambda q, out: torch.add(q[:, : GEOMETRY.top_k], addend, out=out)
        os._exit(handoff_probe.main("service", str(theirs.detach()), "0", "0"))
    theirs.close()
    status = handoff_probe.main("worker", str(ours.detach()), "0", "0")
    return status or os.waitpid(service, 0)[1]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
