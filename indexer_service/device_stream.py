"""One attachment's stream of a GPU: what is launched there waits for nobody else's work."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from indexer_service.executor import DeviceLost
from ipc_handoff import cuda_runtime as cuda

_HIGH_PRIORITY = -1


class Mark(Protocol):
    """A place in a stream's work."""

    def query(self) -> bool:
        """Whether all work before it is done. Never blocks."""


class DeviceStream:
    """Made and used by one thread. torch's own streams are few, and shared by turns: a gate that
    waits in one would hold up another session's steps.

    Args:
        device: with its index.

    Raises:
        DeviceLost: the driver gives no stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = _take(device.index)
        self._stream = torch.cuda.ExternalStream(self._handle, device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Kernels are launched here inside.

        Raises:
            DeviceLost: a call of CUDA failed in a way that ends the context.
        """
        with (
            told_when_lost(self.device),
            torch.cuda.device(self.device),
            torch.cuda.stream(self._stream),
        ):
            yield

    def pinned(self, words: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that copies need not wait for."""
        return torch.zeros(words, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        """After what was launched so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What `launch` launches, as one launch. Graphs of one stream share their temporaries."""
        if not self._graphs:  # torch does not take up a pool whose last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it waits for the whole device. Other threads go on meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        self._graphs.add(graph)
        return graph.replay

    def synchronize(self) -> None:
        """Wait for this stream alone, without Python's lock."""
        self._stream.synchronize()

    def close(self) -> None:
        """After `synchronize`; graphs that were captured here are gone."""
        _give_back(self.device.index, self._handle)


# torch's allocators go on using a stream by its handle, for memory that was used there: it must
# never be destroyed.
_free: defaultdict[int, deque[int]] = defaultdict(deque)


def _take(ordinal: int) -> int:
    """A stream that nobody uses."""
    with suppress(IndexError):
        return _free[ordinal].popleft()
    return _create(ordinal)


def _give_back(ordinal: int, handle: int) -> None:
    _free[ordinal].append(handle)


def _create(ordinal: int) -> int:
    """A stream that does not wait for the default one."""
    from cuda.bindings import driver  # only where there is a GPU

    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    with cuda.on_device(ordinal):
        error, stream = driver.cuStreamCreateWithPriority(flags, _HIGH_PRIORITY)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceLost(f"cuStreamCreateWithPriority: {error.name}")
    return int(stream)


@contextmanager
def told_when_lost(device: torch.device) -> Iterator[None]:
    """Turns an error behind which that GPU's context is gone into DeviceLost."""
    try:
        yield
    except RuntimeError as error:  # torch's and Triton's own
        if _context_works(device):
            raise
        raise DeviceLost(str(error).splitlines()[0]) from error


def _context_works(device: torch.device) -> bool:
    """After an illegal access, every call fails. Other GPUs' contexts go on, and a thread's own
    device is the first one unless it was set.
    """
    try:
        torch.cuda.mem_get_info(device)
    except Exception:
        return False
    return True
