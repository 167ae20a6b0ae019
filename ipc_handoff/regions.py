"""Memory shared between two processes, one class a handle kind.

A *memory* is one mapping; a *region* is a named, shaped view of part of it. The owner makes
a memory and sends its handle; the peer opens the handle. Here: `HostMemory`, a sealed memfd
(no name in a file system, so a killed owner leaks nothing). `cuda_regions.CudaMemory` is its
sibling in device memory.
"""

import fcntl
import math
import mmap
import os
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from ipc_handoff.errors import RegionError

# A peer maps some memory read-only on purpose; nothing here writes through such a tensor.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

DTYPES: dict[str, torch.dtype] = {
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FLOAT32": torch.float32,
    "BFLOAT16": torch.bfloat16,
    "FLOAT16": torch.float16,
    "FLOAT8_E4M3": torch.float8_e4m3fn,
}

_MOST_BYTES = 2**63 - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (elements; empty: contiguous) and dtype of a view."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """What describes `tensor` from its first element on."""
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @property
    def element_strides(self) -> tuple[int, ...]:
        if self.strides:
            return self.strides
        strides, count = [], 1
        for length in reversed(self.shape):
            strides.append(count)
            count *= length
        return tuple(reversed(strides))

    @property
    def byte_size(self) -> int:
        """Bytes from the first element to behind the last."""
        if not all(self.shape):
            return 0
        reach = zip(self.shape, self.element_strides, strict=True)
        return (1 + sum((length - 1) * stride for length, stride in reach)) * self.dtype.itemsize

    def check(self, field_name: str) -> None:
        """Raise RegionError unless the numbers make sense."""
        if not self.shape or min(self.shape) < 1:
            raise RegionError(
                f"{field_name}.shape: {list(self.shape)} (fix: every dimension at least 1)"
            )
        if math.prod(self.shape) * self.dtype.itemsize > _MOST_BYTES:
            raise RegionError(f"{field_name}.shape: {list(self.shape)} (fix: fewer elements)")
        if self.strides and len(self.strides) != len(self.shape):
            raise RegionError(
                f"{field_name}.strides: {len(self.strides)} for {len(self.shape)} dimensions "
                "(fix: one a dimension, or none)"
            )
        if min(self.element_strides) < 0:
            raise RegionError(f"{field_name}.strides: negative (fix: strides of at least 0)")


class SharedMemory(ABC):
    """One mapping of shared memory.

    A tensor made by `tensor` keeps the mapping alive; the bytes are unmapped when the memory
    is closed *and* the last tensor is gone.
    """

    byte_size: int

    @abstractmethod
    def tensor(
        self, offset: int, byte_size: int, spec: TensorSpec, field_name: str
    ) -> torch.Tensor:
        """A view of `spec` inside the `byte_size` bytes at `offset`.

        Raises:
            RegionError: it does not fit, or is misaligned; names `field_name`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up this memory's own hold on the mapping. Closing again does nothing."""

    def check_range(self, offset: int, byte_size: int, field_name: str) -> None:
        if offset < 0 or byte_size < 1 or offset + byte_size > self.byte_size:
            raise RegionError(
                f"{field_name}.byte_size: bytes {offset} to {offset + byte_size} of a memory of "
                f"{self.byte_size} (fix: stay inside the memory)"
            )

    def check_view(
        self, offset: int, byte_size: int, spec: TensorSpec, field_name: str, address: int = 0
    ) -> None:
        """Raise RegionError unless `tensor` can make this view.

        Args:
            address: of the memory's first byte, where it may be misaligned.
        """
        spec.check(field_name)
        self.check_range(offset, byte_size, field_name)
        if spec.byte_size > byte_size:
            raise RegionError(
                f"{field_name}.byte_size: {byte_size}, but shape and strides reach "
                f"{spec.byte_size} bytes (fix: a longer region or a smaller shape)"
            )
        if (address + offset) % spec.dtype.itemsize:
            raise RegionError(
                f"{field_name}.offset: {offset} is not a multiple of the element size "
                f"{spec.dtype.itemsize} (fix: align it)"
            )


class HostMemory(SharedMemory):
    """A memfd, sealed against change of size: no peer can take pages away under a reader."""

    def __init__(self, descriptor: int, byte_size: int, writable: bool) -> None:
        self._descriptor: int | None = descriptor
        self.byte_size = byte_size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map: mmap.mmap | None = mmap.mmap(descriptor, byte_size, mmap.MAP_SHARED, protection)

    @classmethod
    def create(cls, byte_size: int, label: str) -> "HostMemory":
        """Make zeroed memory of `byte_size` bytes (owner's side). `label` shows in /proc."""
        if byte_size < 1:
            raise RegionError(f"{label}.byte_size: {byte_size} (fix: at least 1)")
        descriptor = os.memfd_create(f"dsa-indexer:{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, byte_size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            return cls(descriptor, byte_size, writable=True)
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            raise RegionError(
                f"{label}.byte_size: {byte_size}: {error} (fix: less memory)"
            ) from error

    @classmethod
    def open(cls, descriptor: int, *, writable: bool) -> "HostMemory":
        """Map a peer's memory; takes over the descriptor.

        Raises:
            RegionError: not a memfd sealed against change of size, or empty.
        """
        try:
            try:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & _SEALS != _SEALS:
                raise RegionError(
                    "host: the descriptor is not a memfd sealed against change of size (fix: "
                    "memfd_create with MFD_ALLOW_SEALING, then F_SEAL_SHRINK | F_SEAL_GROW)"
                )
            byte_size = os.fstat(descriptor).st_size
            if byte_size < 1:
                raise RegionError("host: the memory is empty (fix: give it a size, then seal)")
            return cls(descriptor, byte_size, writable)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RegionError(f"host: cannot be mapped: {error}") from error
        except RegionError:
            os.close(descriptor)
            raise

    def fileno(self) -> int:
        if self._descriptor is None:
            raise RegionError("host: the memory is closed")
        return self._descriptor

    def view(self, offset: int = 0, byte_size: int | None = None) -> memoryview:
        """The raw bytes; holds the mapping as a tensor does."""
        if self._map is None:
            raise RegionError("host: the memory is closed")
        end = self.byte_size if byte_size is None else offset + byte_size
        return memoryview(self._map)[offset:end]

    def tensor(
        self, offset: int, byte_size: int, spec: TensorSpec, field_name: str
    ) -> torch.Tensor:
        self.check_view(offset, byte_size, spec, field_name)
        # torch keeps the object it was given alive but not its buffer: given the mmap itself, a
        # close would unmap under the tensor. A memoryview holds the mmap open.
        flat = torch.frombuffer(self.view(offset, spec.byte_size), dtype=torch.uint8)
        return flat.view(spec.dtype).as_strided(spec.shape, spec.element_strides)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        # Dropped, not closed: the mapping goes with the last view, and never under one.
        self._map = None


@dataclass(frozen=True)
class SharedTensor:
    """A tensor that a peer can map: a view of shared memory that this process owns.

    Attributes:
        memory: owns the bytes; several tensors may share one.
        offset: bytes from the memory's start.
    """

    memory: SharedMemory
    offset: int
    spec: TensorSpec
    tensor: torch.Tensor

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: torch.dtype, label: str) -> "SharedTensor":
        """Zeroed contiguous tensor in host memory of its own."""
        spec = TensorSpec(shape, dtype)
        spec.check(label)
        return cls.in_memory(HostMemory.create(spec.byte_size, label), spec)

    @classmethod
    def in_memory(cls, memory: SharedMemory, spec: TensorSpec, offset: int = 0) -> "SharedTensor":
        """View `spec` at byte `offset` of `memory`."""
        tensor = memory.tensor(offset, spec.byte_size, spec, "tensor")
        return cls(memory, offset, spec, tensor)

    @classmethod
    def of_cuda(cls, tensor: torch.Tensor, label: str = "tensor") -> "SharedTensor":
        """An existing CUDA tensor, where it lies; it is kept alive.

        Raises:
            RegionError: it cannot be exported; names `label`, and the setting to change.
        """
        # Here, because that module is built on this one, and only a GPU's owner needs it.
        from ipc_handoff.cuda_regions import CudaMemory

        memory = CudaMemory.of_tensor(tensor, label)
        return cls(memory, 0, TensorSpec.of(tensor), tensor)
