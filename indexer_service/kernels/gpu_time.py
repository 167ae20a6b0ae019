"""How long a call's kernels take, without what the host does before them."""

import statistics
import time
from collections.abc import Callable

import torch

from indexer_service.kernels.architecture import on

_REPLAYS = 5


def microseconds(call: Callable[[], object], device: torch.device, *, calls: int = 10) -> float:
    """The median of a few replays of a graph of `calls` calls, for one of them.

    Args:
        call: launches kernels on the current stream and does not wait for them.
        device: without a GPU the call itself is timed.
    """
    if device.type != "cuda":
        call()
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    with on(device):
        return _replayed(call, calls)


def _replayed(call: Callable[[], object], calls: int) -> float:
    """On the current GPU."""
    call()  # compiles, and whatever else only a first call does
    # A stream of its own that is waited for alone: others may use the GPU meanwhile.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
        finally:
            graph.capture_end()
        return _median(graph, calls)


def _median(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / calls
