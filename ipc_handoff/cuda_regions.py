"""Device memory shared between two processes over CUDA IPC.

A handle names a whole allocation; what is shared is a range of it. Handle bytes alone name
nothing: freed and allocated again at the same address, other memory has the same bytes. So an
allocation is known by its owner, its number in the owner's life, its handle and its GPU, and no
two of them are ever open under one handle.
"""

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ipc_handoff import cuda_runtime as cuda
from ipc_handoff.errors import RegionError, RegionUnavailable
from ipc_handoff.regions import DTYPES, SharedMemory, TensorSpec

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64


@dataclass(frozen=True)
class CudaExport:
    """What a peer needs in order to open device memory.

    Attributes:
        handle: of the whole allocation.
        offset: of the first byte in the allocation.
        byte_size: of the memory.
        gpu_uuid: of the GPU that holds it, as nvidia-smi writes it.
        allocation: unique for each allocation in its owner's life.
    """

    handle: bytes
    offset: int
    byte_size: int
    gpu_uuid: str
    allocation: int


class _Held:
    """Bytes from `address` on stay valid for as long as this object lives."""

    def __init__(self, address: int, keeps: object = None) -> None:
        self.address = address
        self._keeps = keeps


class _View:
    """What torch makes a tensor of; the tensor holds it, and it holds the bytes."""

    def __init__(self, held: _Held, address: int, byte_size: int) -> None:
        self._held = held
        self.__cuda_array_interface__ = {
            "shape": (byte_size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class CudaMemory(SharedMemory):
    """Device memory that this process exports, or has opened.

    Attributes:
        pointer: address of the first byte in this process.
        device: ordinal of the GPU whose kernels use it: the one that holds the memory or, of a
            peer's memory, the one that it was opened for. torch shows tensors on it there.
        export: what a peer opens it by.
    """

    def __init__(self, held: _Held, pointer: int, device: int, export: CudaExport) -> None:
        self._held: _Held | None = held
        self.pointer = pointer
        self.device = device
        self.export = export
        self.byte_size = export.byte_size

    @classmethod
    def allocate(cls, byte_size: int, device: int, label: str) -> "CudaMemory":
        """Zeroed memory in a CUDA allocation of its own, so that its handle exposes nothing else.

        Raises:
            RegionError: no size, or no memory; names `label`.
        """
        if byte_size < 1:
            raise RegionError(f"{label}.byte_size: {byte_size} (fix: at least 1)")
        pointer = cuda.allocate(device, byte_size, label)
        held = _Held(pointer)
        _when_gone(held, cuda.free, device, pointer)
        return cls._exported(held, device, pointer, byte_size, label)

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, label: str) -> "CudaMemory":
        """The bytes of an existing tensor, from its first element to its last; keeps it alive.

        Raises:
            RegionError: not on a GPU, empty, or in memory that cannot be exported; names `label`.
        """
        if not tensor.is_cuda:
            raise RegionError(f"{label}: is on {tensor.device} (fix: a tensor on a GPU)")
        if tensor.dtype not in DTYPES.values():
            raise RegionError(
                f"{label}.data_type: {tensor.dtype} (fix: one of {', '.join(DTYPES)})"
            )
        spec = TensorSpec.of(tensor)
        spec.check(label)
        address = tensor.data_ptr()
        device, byte_size = tensor.get_device(), spec.byte_size
        return cls._exported(_Held(address, tensor), device, address, byte_size, label)

    @classmethod
    def _exported(
        cls, held: _Held, device: int, pointer: int, byte_size: int, label: str
    ) -> "CudaMemory":
        allocation = cuda.exportable_allocation(device, pointer, label)
        export = CudaExport(
            cuda.export_handle(allocation, label),
            pointer - allocation.base,
            byte_size,
            cuda.device_uuid(device),
            allocation.number,
        )
        _exported[export] = held
        return cls(held, pointer, device, export)

    @classmethod
    def open(cls, export: CudaExport, *, owner: str, device: int, field_name: str) -> "CudaMemory":
        """Map a peer's memory for kernels on a GPU; this process's own gives its own address.

        Args:
            owner: the exporting process's name for its life, never used again (a UUID).
            device: ordinal of the GPU whose kernels use the memory, in this process.

        Raises:
            RegionError: a range outside the allocation.
            RegionUnavailable: it cannot be opened, lies on another GPU than it says, or its
                handle is still open for an earlier allocation.
        """
        held = _exported.get(export)
        if held is not None:
            return cls(held, held.address, device, export)
        holder = _visible(export, field_name)
        opened = _openings.open(export, owner, device, field_name)
        try:
            _check_opened(opened.address, export, device, holder, field_name)
        except RegionError:
            del opened  # Closed now, and not when the error's traceback goes.
            raise
        return cls(opened, opened.address + export.offset, device, export)

    def tensor(
        self, offset: int, byte_size: int, spec: TensorSpec, field_name: str
    ) -> torch.Tensor:
        if self._held is None:
            raise RegionError(f"{field_name}: the memory is closed (fix: open it again)")
        self.check_view(offset, byte_size, spec, field_name, self.pointer)
        view: Any = _View(self._held, self.pointer + offset, spec.byte_size)
        flat = torch.as_tensor(view)
        return flat.view(spec.dtype).as_strided(spec.shape, spec.element_strides)

    def close(self) -> None:
        # Dropped, not closed: the mapping goes with the last tensor, and never under one.
        self._held = None


# This process's exports that still live: opening them needs no handle, which CUDA would refuse.
_exported: "weakref.WeakValueDictionary[CudaExport, _Held]" = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _Opening:
    """One open handle.

    Attributes:
        identity: owner and number of the allocation that it was opened for.
        address: of the mapping.
        held: what its users hold; the handle is closed when they are gone.
    """

    identity: tuple[str, int]
    address: int
    held: "weakref.ref[_Held]"


class _Openings:
    """Every handle that this process has open: once, however many use it."""

    def __init__(self) -> None:
        # The collector may close an opening in the middle of any statement, also of this class.
        self._lock = threading.RLock()
        self._open: dict[tuple[int, bytes], _Opening] = {}

    def open(self, export: CudaExport, owner: str, device: int, field_name: str) -> _Held:
        key, identity = (device, export.handle), (owner, export.allocation)
        with self._lock:
            opening = self._open.get(key)
            if opening is not None:
                held = None
                if opening.identity == identity:
                    held = opening.held()
                elif opening.held() is not None:
                    # No local holds the opening: it would stay open for as long as the error.
                    raise RegionUnavailable(
                        f"{field_name}.cuda_ipc.handle: is open for another allocation "
                        f"({opening.identity[1]}, not {export.allocation}) (fix: unregister the "
                        "earlier region first)"
                    )
                if held is not None:
                    return held
                self._close(key, opening)  # Its users are gone; another thread may be about to.
            address = cuda.open_handle(device, export.handle, f"{field_name}.cuda_ipc.handle")
            held = _Held(address)
            opening = _Opening(identity, address, weakref.ref(held))
            self._open[key] = opening
            _when_gone(held, self._close, key, opening)
            return held

    def _close(self, key: tuple[int, bytes], opening: _Opening) -> None:
        with self._lock:
            if self._open.get(key) is opening:
                del self._open[key]
                cuda.close_handle(key[0], opening.address)


_openings = _Openings()


def _visible(export: CudaExport, field_name: str) -> int:
    """Ordinal of the memory's GPU: of memory on another one nobody could say where it lies."""
    holder = cuda.device_of_uuid(export.gpu_uuid)
    if holder is None:
        raise RegionUnavailable(
            f"{field_name}.cuda_ipc.gpu_uuid: {export.gpu_uuid!r} is not visible to this process "
            "(fix: name it in CUDA_VISIBLE_DEVICES)"
        )
    return holder


def _check_opened(
    address: int, export: CudaExport, device: int, holder: int, field_name: str
) -> None:
    """What the peer says about its memory, against what the driver says."""
    field = f"{field_name}.cuda_ipc"
    _, byte_size = cuda.address_range(device, address, f"{field}.handle")
    if export.byte_size < 1 or export.offset + export.byte_size > byte_size:
        raise RegionError(
            f"{field_name}.byte_size: bytes {export.offset} to {export.offset + export.byte_size} "
            f"of an allocation of {byte_size} (fix: stay inside the allocation)"
        )
    if (found := cuda.holder_of(device, address)) != holder:
        raise RegionUnavailable(
            f"{field}.gpu_uuid: {export.gpu_uuid!r}, but the memory lies on device {found} "
            "(fix: the UUID of the memory's GPU)"
        )


def _when_gone(held: _Held, undo: Any, *arguments: Any) -> None:
    """Call `undo` when nobody holds the bytes any more; the process's end does it by itself."""

    def quietly() -> None:
        try:
            undo(*arguments)
        except RegionError as error:  # a context that a fault has ended, for one
            logger.warning("device memory: %s", error)

    weakref.finalize(held, quietly).atexit = False
