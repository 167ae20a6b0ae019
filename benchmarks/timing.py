"""Times of calls on a GPU: captured in CUDA graphs, taken in turns.

Without a GPU the same calls run under the host's clock, so that a benchmark can be rehearsed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

ROUNDS = 15

Replay = Callable[[], float]
"""Runs the captured calls once; returns µs a call."""


@dataclass(frozen=True)
class Time:
    """µs a call over the rounds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class _Graph:
    """Replays captured calls.

    Attributes:
        call: kept, because what it refers to must live as long as the graph that uses it.
    """

    call: Callable[[int], object]
    calls: int
    prepare: Callable[[], None]
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.prepare()
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.calls


def captured(
    call: Callable[[int], object], calls: int, *, before: Callable[[], None] | None = None
) -> Replay:
    """Capture `call(0)` to `call(calls - 1)` in one graph.

    Args:
        before: runs ahead of every replay, outside the measured time: new inputs, for example.
    """
    prepare = before or (lambda: None)
    prepare()
    call(0)
    if not torch.cuda.is_available():
        return _on_the_host(call, calls, prepare)
    replay = _Graph(call, calls, prepare, _graph(call, calls))
    replay()
    return replay


def eager(call: Callable[[int], object], calls: int) -> Replay:
    """The same for calls that wait for the GPU and so cannot be captured: the host's clock."""
    call(0)
    return _on_the_host(call, calls, lambda: None)


def in_turns(replays: Mapping[str, Replay], rounds: int = ROUNDS) -> dict[str, Time]:
    """One replay of each, again and again, so that a slow moment strikes all of them."""
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            taken[name].append(replay())
    return {name: Time(median(times), min(times), max(times)) for name, times in taken.items()}


def copy_rate(elements: int = 1 << 29) -> float:
    """Bytes a second of a large element-wise copy, counting read and written ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    replay = captured(lambda _: torch.neg(source, out=target), 4)
    return 2 * source.nbytes / (in_turns({"copy": replay})["copy"].median * 1e-6)


def _graph(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """A capture that fails leaves torch's state behind it in disorder: what can be told before
    (a call that waits for the GPU) is, and the stream is put back."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
    except Exception as error:
        torch.cuda.set_stream(stream)
        raise error.__context__ or error from None
    return graph


def _on_the_host(call: Callable[[int], object], calls: int, prepare: Callable[[], None]) -> Replay:
    def replay() -> float:
        prepare()
        _wait()
        began = time.perf_counter_ns()
        for i in range(calls):
            call(i)
        _wait()
        return (time.perf_counter_ns() - began) / 1e3 / calls

    return replay


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
