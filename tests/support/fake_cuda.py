"""A stand-in for `cuda.bindings`: GPUs, processes and IPC handles as the driver treats them.

It models what the code under test relies on, the dangers included: handle bytes name a process
and an address, not an allocation; an open handle is counted and gives the same address again,
whatever it names by now; a call without a current context fails. Device memory is host memory.
"""

import ctypes
import hashlib
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from ipc_handoff import cuda_regions, cuda_runtime
from ipc_handoff.regions import TensorSpec
from tests.support.fake_cuda_names import (
    CUdevice_attribute,
    CUipcMem_flags,
    CUipcMemHandle,
    CUpointer_attribute,
    CUresult,
    CUstream_flags,
)

_STEP = 1 << 21
# Of all processes of all tests: what is freed late is never taken for another's.
_ADDRESSES = count(_STEP, _STEP)
_CACHES = ("_driver", "_device", "_primary_context", "device_uuid")


OK = CUresult.CUDA_SUCCESS


@dataclass(eq=False)
class Memory:
    """One allocation. kind: "malloc", "vmm", "pool" or "managed"."""

    gpu: int
    data: torch.Tensor
    kind: str = "malloc"
    number: int = 0


@dataclass
class Machine:
    """GPUs of one host.

    Attributes:
        reachable: pairs of GPUs that can access each other.
        mps: what the driver says of MPS; None: it does not know the question.
    """

    gpus: int = 2
    reachable: set[frozenset[int]] = field(default_factory=lambda: {frozenset((0, 1))})
    mps: bool | None = False
    bytes_free: int = 1 << 30
    handles: dict[bytes, Memory] = field(default_factory=dict)

    def uuid(self, gpu: int) -> str:
        return f"GPU-00000000-0000-0000-0000-{gpu + 1:012x}"


@dataclass(eq=False)
class Process:
    """What one process sees of the machine; its attributes are the driver's functions.

    Attributes:
        visible: the machine's GPUs, in the order of the process's ordinals.
        opened, closed: handles that the driver was asked to open and to close.
    """

    machine: Machine
    pid: int
    visible: tuple[int, ...] = (0, 1)
    memories: dict[int, Memory] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    by_handle: dict[bytes, int] = field(default_factory=dict)
    opened: int = 0
    closed: int = 0

    CUresult = CUresult
    CUpointer_attribute = CUpointer_attribute
    CUdevice_attribute = CUdevice_attribute
    CUstream_flags = CUstream_flags
    CUipcMem_flags = CUipcMem_flags
    CUipcMemHandle = CUipcMemHandle

    def __post_init__(self) -> None:
        self._thread = threading.local()
        self._numbers = count(1)
        self._freed: list[int] = []
        self.exported = cuda_regions._exported.__class__()
        self.openings = cuda_regions._Openings()

    # Devices and contexts.

    @property
    def contexts(self) -> list[int]:
        """Of the calling thread, the current one last."""
        return self._thread.__dict__.setdefault("contexts", [])

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (OK,)

    def cuDeviceGetCount(self) -> tuple[CUresult, int]:
        return OK, len(self.visible)

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, int]:
        known = 0 <= ordinal < len(self.visible)
        return (OK if known else CUresult.CUDA_ERROR_INVALID_DEVICE), ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[CUresult, Any]:
        text = self.machine.uuid(self.visible[device]).removeprefix("GPU-").replace("-", "")
        return OK, types.SimpleNamespace(bytes=bytes.fromhex(text))

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[CUresult, int]:
        if self.machine.mps is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        return OK, int(self.machine.mps)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[CUresult, int]:
        return OK, int(self._reaches(self.visible[device], self.visible[peer]))

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[CUresult, int]:
        return OK, device

    def cuCtxPushCurrent(self, context: int) -> tuple[CUresult]:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[CUresult, int]:
        return OK, self.contexts.pop()

    def cuCtxEnablePeerAccess(self, peer: int, flags: int) -> tuple[CUresult]:
        if not self._reaches(self.visible[self.contexts[-1]], self.visible[peer]):
            return (CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)
        return (CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)

    def _reaches(self, gpu: int, other: int) -> bool:
        return gpu == other or frozenset((gpu, other)) in self.machine.reachable

    # Memory.

    def cuMemAlloc(self, byte_size: int) -> tuple[CUresult, int]:
        if not self.contexts:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
        if byte_size > self.machine.bytes_free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        return OK, self.place(byte_size, self.contexts[-1])

    def place(self, byte_size: int, ordinal: int = 0, kind: str = "malloc") -> int:
        """An allocation; the address freed last is used first. Not zeroed."""
        address = self._freed.pop() if self._freed else next(_ADDRESSES)
        data = torch.full((byte_size,), 0xEE, dtype=torch.uint8)
        self.memories[address] = Memory(self.visible[ordinal], data, kind, next(self._numbers))
        return address

    def cuMemFree(self, pointer: int) -> tuple[CUresult]:
        if self.memories.pop(pointer, None) is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._freed.append(pointer)
        return (OK,)

    def cuStreamCreate(self, flags: int) -> tuple[CUresult, str]:
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING
        return OK, "stream"

    def cuStreamSynchronize(self, stream: str) -> tuple[CUresult]:
        return (OK,)

    def cuStreamDestroy(self, stream: str) -> tuple[CUresult]:
        return (OK,)

    def cuMemsetD8Async(
        self, pointer: int, value: int, byte_size: int, stream: str
    ) -> tuple[CUresult]:
        self.bytes_at(pointer, byte_size).fill_(value)
        return (OK,)

    def cuMemGetAddressRange(self, pointer: int) -> tuple[CUresult, int, int]:
        base = self._base(pointer)
        if base is None or not self.contexts:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return OK, base, len(self.memories[base].data)

    def cuPointerGetAttribute(self, attribute: int, pointer: int) -> tuple[CUresult, Any]:
        base = self._base(pointer)
        if base is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        memory = self.memories[base]
        holder = self.visible.index(memory.gpu) if memory.gpu in self.visible else -1
        return OK, {
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID: memory.number,
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED: memory.kind == "managed",
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: holder,
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: memory.kind
            == "malloc",
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: int(memory.kind == "pool"),
        }[CUpointer_attribute(attribute)]

    def _base(self, pointer: int) -> int | None:
        for base, memory in self.memories.items():
            if base <= pointer < base + len(memory.data):
                return base
        return None

    def bytes_at(self, pointer: int, byte_size: int) -> torch.Tensor:
        """The memory behind an address, uint8."""
        base = self._base(pointer)
        assert base is not None, "an illegal access"
        offset = pointer - base
        assert offset + byte_size <= len(self.memories[base].data), "an illegal access"
        return self.memories[base].data[offset : offset + byte_size]

    # Handles.

    def cuIpcGetMemHandle(self, pointer: int) -> tuple[CUresult, Any]:
        memory = self.memories.get(pointer)
        if memory is None or memory.kind != "malloc":
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        handle = CUipcMemHandle()
        handle.reserved = hashlib.sha512(f"{self.pid}:{pointer}".encode()).digest()
        self.machine.handles[handle.reserved] = memory
        self.by_handle[handle.reserved] = pointer
        return OK, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[CUresult, int]:
        assert flags == CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        memory = self.machine.handles.get(handle.reserved)
        if not self.contexts or memory is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        known = self.by_handle.get(handle.reserved)
        if known is not None and known not in self.counts:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0  # this process's own
        if known is None:
            known = next(_ADDRESSES)
            self.memories[known], self.by_handle[handle.reserved] = memory, known
        self.counts[known] = self.counts.get(known, 0) + 1
        self.opened += 1
        return OK, known

    def cuIpcCloseMemHandle(self, pointer: int) -> tuple[CUresult]:
        if not self.contexts or pointer not in self.counts:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.closed += 1
        self.counts[pointer] -= 1
        if not self.counts[pointer]:
            del self.counts[pointer], self.memories[pointer]
            self.by_handle = {h: p for h, p in self.by_handle.items() if p != pointer}
        return (OK,)

    def tensor(self, shape: tuple[int, ...], offset: int = 0, kind: str = "malloc") -> Any:
        """What `CudaMemory.of_tensor` asks of a uint8 tensor that lies in a larger allocation."""
        spec = TensorSpec(shape, torch.uint8)
        base = self.place(offset + spec.byte_size + 100, kind=kind)
        return FakeTensor(self, base + offset, spec)


class FakeTensor:
    is_cuda = True
    device = "cuda:0"

    def __init__(self, process: Process, address: int, spec: TensorSpec) -> None:
        self.dtype, self.shape = spec.dtype, spec.shape
        self._address, self._strides = address, spec.element_strides
        self.data = process.bytes_at(address, spec.byte_size)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return 0


class _Array:
    """Lets numpy, and through it torch, hold what stands for device memory."""

    def __init__(self, data: torch.Tensor, keeps: object) -> None:
        self._keeps = data, keeps
        self.__array_interface__ = {
            "shape": (len(data),),
            "typestr": "|u1",
            "data": (ctypes.c_void_p(data.data_ptr()).value, False),
            "version": 3,
        }


@contextmanager
def running_as(process: Process) -> Iterator[Process]:
    """Inside, this process is that one: its driver, its exports, its openings."""
    with pytest.MonkeyPatch.context() as patch:
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = process  # type: ignore[attr-defined]
        package = types.ModuleType("cuda")
        package.bindings = bindings  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "cuda", package)
        patch.setitem(sys.modules, "cuda.bindings", bindings)
        patch.setattr(cuda_regions, "_exported", process.exported)
        patch.setattr(cuda_regions, "_openings", process.openings)
        as_tensor = torch.as_tensor

        def fake_as_tensor(data: Any, **options: Any) -> torch.Tensor:
            interface = getattr(data, "__cuda_array_interface__", None)
            if interface is None:
                return as_tensor(data, **options)
            (byte_size,) = interface["shape"]
            shown = process.bytes_at(interface["data"][0], byte_size)
            return torch.from_numpy(np.asarray(_Array(shown, data)))

        patch.setattr(torch, "as_tensor", fake_as_tensor)
        _forget()
        try:
            yield process
        finally:
            _forget()


def _forget() -> None:
    """What the code under test remembers of the driver."""
    for name in _CACHES:
        getattr(cuda_runtime, name).cache_clear()
