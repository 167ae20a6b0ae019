"""What a session of a load test needs of a GPU: the thin layer that only a GPU can run."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attention_worker.device_session import DeviceIndexer
from attention_worker.streams import side_stream
from indexer_client import ClientSettings
from ipc_handoff import cuda_runtime
from ipc_handoff.layout import HandoffGeometry

_MIB = 1 << 20
_MILLISECOND = 1_000_000


class Cuda:
    """One GPU and one stream, on which everything runs.

    Args:
        ordinal: of the GPU.
        service_gpu: UUID of the service's; empty: there is no service.

    Raises:
        RuntimeError: the service's GPU is not visible to this process.
    """

    def __init__(self, ordinal: int, service_gpu: str) -> None:
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(side_stream(self.device))
        self._peer: int | None = None
        if service_gpu and service_gpu != cuda_runtime.device_uuid(ordinal):
            self._peer = cuda_runtime.device_of_uuid(service_gpu)
            if self._peer is None:
                raise RuntimeError(
                    f"service: its GPU {service_gpu} is not visible here (fix: name it in "
                    "CUDA_VISIBLE_DEVICES, or load.device)"
                )

    def indexer(
        self, geometry: HandoffGeometry, k_caches: Mapping[int, Tensor], settings: ClientSettings
    ) -> DeviceIndexer:
        """A session on this GPU, not started."""
        return DeviceIndexer(
            geometry,
            k_caches,
            device=self.device,
            settings=settings,
            service_device=self._peer,
            engine_name="load",
        )

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def used_mib(self) -> dict[str, float]:
        """Of each GPU that worker and service use, whoever holds it."""
        found = {}
        for ordinal in {self.device.index, self._peer} - {None}:
            free, total = torch.cuda.mem_get_info(ordinal)
            found[f"GPU {ordinal}"] = (total - free) / _MIB
        return found

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run a forward once, so that every kernel is there, and make it one graph."""
        forward()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process make banks meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            forward()
        return graph.replay

    def timed(self, enqueue: Callable[[], None]) -> int:
        """Nanoseconds that the GPU takes for what is enqueued; waits for it."""
        begin, end = _timing_event(), _timing_event()
        begin.record()
        enqueue()
        end.record()
        end.synchronize()
        return round(float(begin.elapsed_time(end)) * _MILLISECOND)

    def synchronize(self) -> None:
        """Wait for the stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def give_back(self) -> None:
        """Cached memory goes back to the driver."""
        self.synchronize()
        torch.cuda.empty_cache()


def _timing_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
