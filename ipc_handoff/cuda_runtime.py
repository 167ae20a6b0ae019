"""The few calls of the CUDA driver that sharing device memory needs.

Through `cuda.bindings`, imported on the first call: a CPU has no use for it. The driver's own
interface, not the runtime's: a refused call leaves no last error behind for whoever calls CUDA
next. Every function makes the device's primary context (the one that torch uses) current for its
own duration, so that any thread may call it, and leaves the thread's choice as it was.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ipc_handoff.errors import RegionError, RegionUnavailable

_DEFAULT_MPS_PIPES = "/tmp/nvidia-mps"


@dataclass(frozen=True)
class Allocation:
    """What the driver allocated as one piece.

    Attributes:
        base: address of its first byte.
        byte_size: of the whole.
        device: ordinal of the GPU that holds it.
        number: unique for each allocation in the process's life, also at a reused address.
    """

    base: int
    byte_size: int
    device: int
    number: int


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RegionUnavailable(
            "cuda: the package cuda-bindings is not installed (fix: pip install 'dsa-indexer[gpu]')"
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:  # it found no libcuda
        raise RegionUnavailable(
            f"cuda: {error} (fix: a host with an NVIDIA driver, visible to this process)"
        ) from error
    _check(driver, result, "cuda", "cannot be initialised", "a visible GPU and a working driver")
    return driver


def _check(driver: Any, result: Any, field: str, problem: str, fix: str) -> None:
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RegionUnavailable(f"{field}: {problem}: {result.name} (fix: {fix})")


def call(function: str, *arguments: Any, field: str, problem: str, fix: str) -> Any:
    """Call the driver; what it returns behind the error code, if anything.

    Raises:
        RegionUnavailable: another code than success; named in the message.
    """
    driver = _driver()
    result, *values = getattr(driver, function)(*arguments)
    _check(driver, result, field, problem, fix)
    return values[0] if values else None


def _pointer_attribute(name: str, pointer: int) -> Any:
    """None where the driver does not know the attribute of this pointer."""
    driver = _driver()
    attribute = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    result, value = driver.cuPointerGetAttribute(attribute, pointer)
    return value if result == driver.CUresult.CUDA_SUCCESS else None


# Devices.


@cache
def _device(ordinal: int) -> Any:
    return call(
        "cuDeviceGet",
        ordinal,
        field="device",
        problem=f"{ordinal} is not a GPU",
        fix="the ordinal of a GPU that CUDA_VISIBLE_DEVICES shows",
    )


@cache
def _primary_context(ordinal: int) -> Any:
    """Held for the process's life, as torch holds it."""
    return call(
        "cuDevicePrimaryCtxRetain",
        _device(ordinal),
        field="device",
        problem=f"{ordinal} gives no context",
        fix="free its memory, or look at its compute mode in nvidia-smi",
    )


@contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """The device's primary context is current in this thread, and afterwards what was before."""
    terms = {"field": "device", "problem": f"{ordinal}'s context", "fix": "see the error's name"}
    call("cuCtxPushCurrent", _primary_context(ordinal), **terms)
    try:
        yield
    finally:
        call("cuCtxPopCurrent", **terms)


def device_count() -> int:
    """GPUs that this process sees; 0 also without a driver or `cuda-bindings`."""
    try:
        count = call("cuDeviceGetCount", field="cuda", problem="no count", fix="a driver")
    except RegionError:
        return 0
    return int(count)


@cache
def device_uuid(ordinal: int) -> str:
    """UUID of a GPU as nvidia-smi writes it: "GPU-" and five groups of hexadecimal digits."""
    found = call(
        "cuDeviceGetUuid",
        _device(ordinal),
        field="device",
        problem=f"{ordinal} has no UUID",
        fix="a newer driver",
    )
    return f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}"


def device_of_uuid(gpu_uuid: str) -> int | None:
    """Ordinal of a GPU in this process; None if it is not visible here."""
    for ordinal in range(device_count()):
        if device_uuid(ordinal) == gpu_uuid:
            return ordinal
    return None


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Whether kernels on one GPU can use the memory of another."""
    return bool(
        call(
            "cuDeviceCanAccessPeer",
            _device(ordinal),
            _device(peer),
            field="device",
            problem=f"nothing is known of {ordinal} and {peer}",
            fix="GPUs of one host",
        )
    )


def enable_peer_access(ordinal: int, peer: int) -> None:
    """Let kernels on `ordinal` use memory that this process has on `peer`.

    Raises:
        RegionUnavailable: the GPUs have no way to each other.
    """
    driver = _driver()
    with on_device(ordinal):
        (result,) = driver.cuCtxEnablePeerAccess(_primary_context(peer), 0)
    if result != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        fix = "GPUs with NVLink or peer access over PCIe (nvidia-smi topo -p2p r)"
        _check(driver, result, "device", f"{ordinal} cannot access {peer}", fix)


def runs_under_mps(ordinal: int = 0) -> bool:
    """Whether this process's contexts on a GPU go through an MPS daemon."""
    driver = _driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    result, enabled = driver.cuDeviceGetAttribute(attribute, _device(ordinal))
    if result == driver.CUresult.CUDA_SUCCESS:
        return bool(enabled)
    # A driver that cannot tell: a daemon listens where this process would look for it.
    return (
        Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT_MPS_PIPES)) / "control"
    ).exists()


# Memory.


def allocate(ordinal: int, byte_size: int, field: str) -> int:
    """Zeroed memory in an allocation of its own; its address."""
    with on_device(ordinal):
        pointer = call(
            "cuMemAlloc",
            byte_size,
            field=f"{field}.byte_size",
            problem=f"{byte_size} bytes on device {ordinal}",
            fix="smaller banks, or leave more of the GPU's memory free",
        )
    zero(ordinal, int(pointer), byte_size)
    return int(pointer)


def free(ordinal: int, pointer: int) -> None:
    """Give back what `allocate` gave. A peer's mapping stays valid until it is closed."""
    with on_device(ordinal):
        call("cuMemFree", pointer, field="memory", problem="is not freed", fix="free it once")


def zero(ordinal: int, pointer: int, byte_size: int) -> None:
    """Write zeros and wait for them, on a stream of its own: no other stream is waited for."""
    driver = _driver()
    terms = {"field": "memory", "problem": "cannot be zeroed", "fix": "see the error's name"}
    with on_device(ordinal):
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = call("cuStreamCreate", flags, **terms)
        try:
            call("cuMemsetD8Async", pointer, 0, byte_size, stream, **terms)
            call("cuStreamSynchronize", stream, **terms)
        finally:
            call("cuStreamDestroy", stream, **terms)


def address_range(ordinal: int, pointer: int, field: str) -> tuple[int, int]:
    """Base and bytes of the allocation or mapping that holds `pointer`."""
    driver = _driver()
    with on_device(ordinal):
        result, base, byte_size = driver.cuMemGetAddressRange(pointer)
    _check(driver, result, field, "is in no CUDA allocation", "memory that CUDA allocated")
    return int(base), int(byte_size)


def holder_of(ordinal: int, pointer: int) -> int | None:
    """Ordinal of the GPU that holds device memory, which must be visible to this process.

    The runtime's attribute of the same name, which torch goes by, says of opened memory what it
    was opened for.

    Args:
        ordinal: of the GPU that the memory was allocated or opened for.
    """
    with on_device(ordinal):
        holder = _pointer_attribute("DEVICE_ORDINAL", pointer)
    return None if holder is None else int(holder)


def exportable_allocation(ordinal: int, pointer: int, field: str) -> Allocation:
    """The allocation on a GPU that holds `pointer`, if its memory can be exported.

    Raises:
        RegionUnavailable: it cannot; names `field` and the setting to change.
    """
    with on_device(ordinal):
        if _pointer_attribute("IS_MANAGED", pointer):
            raise RegionUnavailable(
                f"{field}: managed memory cannot be exported (fix: memory of cudaMalloc, as torch "
                "gives by default)"
            )
        if not _pointer_attribute("IS_LEGACY_CUDA_IPC_CAPABLE", pointer):
            raise RegionUnavailable(
                f"{field}: its allocation has no CUDA IPC handle (fix: {_setting(pointer)})"
            )
        number = _pointer_attribute("BUFFER_ID", pointer)
    if not number:
        raise RegionUnavailable(f"{field}: its allocation has no number (fix: a newer driver)")
    base, byte_size = address_range(ordinal, pointer, field)
    return Allocation(base, byte_size, ordinal, int(number))


def _setting(pointer: int) -> str:
    """What to change so that such memory can be exported."""
    pool = _pointer_attribute("MEMPOOL_HANDLE", pointer)
    if pool is not None and int(pool):
        return "PYTORCH_CUDA_ALLOC_CONF=backend:native instead of backend:cudaMallocAsync"
    return (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and no allocator of virtual memory, "
        "such as vLLM's sleep mode"
    )


# Handles.


def export_handle(allocation: Allocation, field: str) -> bytes:
    """The 64 bytes under which another process opens a whole allocation."""
    with on_device(allocation.device):
        handle = call(
            "cuIpcGetMemHandle",
            allocation.base,
            field=field,
            problem="cannot be exported",
            fix="memory of cudaMalloc, on a platform that has CUDA IPC (Linux, no WSL)",
        )
    return bytes(handle.reserved)


def open_handle(ordinal: int, handle: bytes, field: str) -> int:
    """Map another process's allocation for kernels on a GPU; the mapping's address.

    The driver counts: each call needs a `close_handle`.
    """
    driver = _driver()
    wanted = driver.CUipcMemHandle()
    wanted.reserved = handle
    flags = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    with on_device(ordinal):
        pointer = call(
            "cuIpcOpenMemHandle",
            wanted,
            flags,
            field=field,
            problem="cannot be opened",
            fix="a living owner that still has the memory, on a GPU with peer access; containers "
            "share --ipc and --pid",
        )
    return int(pointer)


def close_handle(ordinal: int, pointer: int) -> None:
    """Undo one `open_handle`."""
    with on_device(ordinal):
        call(
            "cuIpcCloseMemHandle",
            pointer,
            field="memory",
            problem="is not closed",
            fix="close once",
        )


def launches_block() -> bool:
    """Whether CUDA_LAUNCH_BLOCKING makes every launch wait for its kernel."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
