"""A session on a GPU, as an engine's worker has it: K caches of its own that the service reads over
CUDA IPC, decode steps as FULL graphs by size of batch, other steps eagerly."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.load.answers import contradiction, exact_scores, first_difference
from dsa_indexer_cli.load.cuda import Cuda
from dsa_indexer_cli.load.messages import Order
from dsa_indexer_cli.load.recorded import steps_of
from dsa_indexer_cli.load.steps import Kind, PlannedStep
from dsa_indexer_cli.load.worker import NO_TIME, Check, Opened, Ran, Tell
from dsa_indexer_cli.load.workload import HEAD_DIM, INLINE, WorkloadError
from indexer_client import ClientSettings, IndexerError, StepInputs
from indexer_client.statistics import Statistics
from indexer_service.step_graphs import bucket_of
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import WorkerStage

_ATTACH_SECONDS = 300.0
"""The service makes its kernels when it is told of the caches."""
_RPC_SECONDS = 60.0
_INSERTED = 1 << 16
"""Keys that are quantised at once."""
_KEPT_FREE = 1 << 30
"""Bytes that caches leave: banks, graphs and the service's temporaries."""
_STAMPS_NANOSECONDS = 10_000_000
"""Stamps are read so often at most: a hundred times a second it costs less than 1 %."""


class Indexer(Protocol):
    """What is used of `DeviceIndexer`."""

    placement_reason: str

    @property
    def placement(self) -> str: ...
    @property
    def reasons(self) -> tuple[str, ...]: ...
    @property
    def statistics(self) -> Statistics: ...

    def warm_up(
        self, next_n: Sequence[int], *, progress: Callable[[int, int, str], None] | None = None
    ) -> None: ...
    def insert(self, k: Tensor, slots: Tensor, layer: int) -> None: ...
    def start(self) -> None: ...
    def wait_attached(self, seconds: float) -> None: ...
    def begin_step(self, inputs: StepInputs) -> int: ...
    def begin_inline(self, rows: int, rows_per_decode: int = 1) -> None: ...
    def select(self, layer: int, q: Tensor, weights: Tensor, out: Tensor) -> None: ...
    def stamps(self, step: int) -> Sequence[Sequence[int]] | None: ...
    def close(self) -> None: ...


class Gpu(Protocol):
    """What is used of `Cuda`, which see."""

    device: torch.device

    def indexer(
        self, geometry: HandoffGeometry, k_caches: Mapping[int, Tensor], settings: ClientSettings
    ) -> Indexer: ...
    def free_bytes(self) -> int: ...
    def used_mib(self) -> dict[str, float]: ...
    def capture(self, forward: Callable[[], None]) -> Callable[[], None]: ...
    def timed(self, enqueue: Callable[[], None]) -> int: ...
    def synchronize(self) -> None: ...
    def give_back(self) -> None: ...


class GraphSize(NamedTuple):
    """Of a captured forward: decode requests, padded, and rows of each."""

    requests: int
    rows_per_decode: int

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_decode


def graph_size(
    kind: Kind, requests: int, rows_per_decode: int, geometry: HandoffGeometry
) -> GraphSize | None:
    """The graph that a step of so many requests runs; None for steps that run eagerly."""
    if kind is not Kind.DECODE:
        return None
    size = GraphSize(bucket_of(requests, geometry.max_requests), rows_per_decode)
    # A batch that fills all rows may have no room for padding.
    return size if size.rows <= geometry.max_rows else size._replace(requests=requests)


def make_gpu_worker(order: Order) -> "GpuWorker":
    """In the session's process: nothing of CUDA may have been used before."""
    return GpuWorker(order, Cuda(order.workload.load.device, order.service_gpu))


class GpuWorker:
    """Args:
    order: of the session.
    gpu: that it runs on.

    Raises:
        WorkloadError: the caches do not fit the GPU.
    """

    def __init__(self, order: Order, gpu: Gpu) -> None:
        load = order.workload.load
        self.steps = steps_of(order.workload, order.seed, gpu.device)
        self._gpu, self._seed = gpu, order.seed
        # A service that shares the GPU, and makes kernels for others, takes its time.
        patient = {"rpc_timeout_seconds": _RPC_SECONDS}
        self._settings = order.settings().model_copy(update=patient)
        self._attach_seconds = load.attach_seconds or _ATTACH_SECONDS
        self._ahead_seconds = load.ahead_seconds
        self._is_inline = load.placement == INLINE
        geometry = self.steps.geometry
        sizes = {
            graph_size(shape.kind, len(shape.rows), shape.rows_per_decode, geometry)
            for shape in self.steps.shapes
        }
        self._sizes = sorted(size for size in sizes if size is not None)
        self._caches = self._allocate_caches()
        self._selector = InlineSelector(self._caches, geometry.top_k)
        layers, rows = len(geometry.layers), max((size.rows for size in self._sizes), default=0)
        heads, k, device = geometry.heads, geometry.top_k, gpu.device
        # What graphs read and write.
        self._q = torch.zeros((layers, rows, heads, HEAD_DIM), dtype=torch.uint8, device=device)
        self._weights = torch.zeros((layers, rows, heads), device=device)
        self._out = torch.empty((layers, rows, k), dtype=torch.int32, device=device)
        # What eager steps write: of the compared layer, and of all others.
        self._kept = torch.empty((geometry.max_rows, k), dtype=torch.int32, device=device)
        self._rest = torch.empty_like(self._kept)
        self._expected = torch.empty_like(self._kept)
        self._graphs: dict[GraphSize, Callable[[], None]] = {}
        self._has_keys = False
        self._stamped = 0
        self._asked = self._answered = 0

    def _allocate_caches(self) -> dict[int, Tensor]:
        geometry = self.steps.geometry
        shape = (self.steps.pages, geometry.page_size, HEAD_DIM + 4)
        wanted = torch.Size(shape).numel() * len(geometry.layers)
        if wanted > (free := self._gpu.free_bytes() - _KEPT_FREE):
            raise WorkloadError(
                f"model.cache_tokens: {len(geometry.layers)} K caches of {self.steps.pages} pages "
                f"take {wanted / 2**30:.1f} GiB, and {max(free, 0) / 2**30:.1f} are free (fix: "
                "fewer cache_tokens, layers or sessions)"
            )
        return {
            layer: torch.zeros(shape, dtype=torch.uint8, device=self._gpu.device)
            for layer in geometry.layers
        }

    def open(self, tell: Tell) -> Opened:
        self._indexer = self._gpu.indexer(self.steps.geometry, self._caches, self._settings)
        try:
            self._prepare(tell)
            self._indexer.start()
            if not self._is_inline:
                tell("attaching")
                self._indexer.wait_attached(self._attach_seconds)
        except (IndexerError, RuntimeError, ValueError):
            self.close()
            raise
        self._asked = self._answered = 0
        reasons = (self._indexer.placement_reason, *self._indexer.reasons)
        return Opened(str(self._indexer.placement), reasons)

    def _prepare(self, tell: Tell) -> None:
        """Keys, kernels and graphs: before the service is looked for, so that what was tuned is on
        disk when it makes its own.
        """
        if not self._has_keys or self._indexer.placement == "peer_gpu":  # a replica is a new one
            tell("filling the K caches")
            self._insert_keys()
            self._has_keys = True
        next_n = sorted({size.rows_per_decode for size in self._sizes}) or [1]
        self._indexer.warm_up(
            next_n, progress=lambda done, of, what: tell(f"kernels, {done} of {of}: {what}")
        )
        for size in self._sizes:
            tell(f"capturing {size.requests} requests of {size.rows_per_decode} rows")
            self._indexer.begin_inline(size.rows, size.rows_per_decode)
            self._graphs[size] = self._gpu.capture(partial(self._forward, size.rows))

    def _insert_keys(self) -> None:
        """As an engine does; the same keys each time, other ones in each layer."""
        geometry, device = self.steps.geometry, self._gpu.device
        tokens = self.steps.pages * geometry.page_size
        source = torch.Generator(device=device).manual_seed(self._seed)
        for layer in geometry.layers:
            for first in range(0, tokens, _INSERTED):
                slots = torch.arange(first, min(first + _INSERTED, tokens), device=device)
                keys = torch.randn((len(slots), HEAD_DIM), generator=source, device=device)
                self._indexer.insert(keys.to(torch.bfloat16), slots, layer)
        self._gpu.synchronize()

    def _forward(self, rows: int) -> None:
        """All layers of a decode step, as it is captured."""
        for ordinal, layer in enumerate(self.steps.geometry.layers):
            self._indexer.select(
                layer,
                self._q[ordinal, :rows],
                self._weights[ordinal, :rows],
                self._out[ordinal, :rows],
            )

    def run(self, number: int, planned: PlannedStep, compared: int | None) -> Ran:
        geometry, inputs = self.steps.geometry, planned.inputs
        rows = inputs.rows
        q, weights = self.steps.queries(number, rows)
        size = graph_size(planned.kind, inputs.requests, inputs.rows_per_decode, geometry)
        if size is not None:
            self._q[:, :rows].copy_(q)
            self._weights[:, :rows].copy_(weights)
            enqueue = self._graphs[size]
        else:
            enqueue = partial(self._eagerly, q, weights, compared)
        self._gpu.synchronize()
        began = time.monotonic_ns()
        step = self._indexer.begin_step(inputs)
        if self._ahead_seconds:
            self._gpu.synchronize()
            time.sleep(self._ahead_seconds)
        forward = self._gpu.timed(enqueue)
        ended = time.monotonic_ns()
        self._asked += len(geometry.layers)
        check = None
        if compared is not None:
            ordinal = geometry.layers.index(compared)
            answer = self._kept[:rows] if size is None else self._out[ordinal, : size.rows]
            query = (q[ordinal], weights[ordinal])
            check = Check(number, compared, inputs, query, answer.clone())
        return Ran(began, ended, self._layer_times(step, ended), forward=forward, check=check)

    def _eagerly(self, q: Tensor, weights: Tensor, compared: int | None) -> None:
        """All layers of a step that has no graph."""
        for ordinal, layer in enumerate(self.steps.geometry.layers):
            out = self._kept if layer == compared else self._rest
            self._indexer.select(layer, q[ordinal], weights[ordinal], out[: q.shape[1]])

    def _layer_times(self, step: int, now: int) -> Sequence[int]:
        if now - self._stamped >= _STAMPS_NANOSECONDS:
            self._stamped = now
            if (stamps := self._indexer.stamps(step)) is not None:
                return layer_times(stamps)
        return [NO_TIME] * len(self.steps.geometry.layers)

    def inline_since(self) -> int:
        answered = self._indexer.statistics.answered_layers
        inline = self._asked - (answered - self._answered)
        self._asked, self._answered = 0, answered
        return max(inline, 0)

    def compare(self, check: Check) -> str:
        rows = check.inputs.rows
        expected = self._expected[:rows]
        self._selector(check.layer, *check.query, check.inputs, expected)
        if wrong := first_difference(check.answer, expected):
            return wrong
        # Kernels of both sides are the same code: one row against another way to compute it.
        row = check.number % rows
        scores = exact_scores(row, *check.query, self._caches[check.layer], check.inputs)
        wrong = contradiction(check.answer[row], scores)
        return f"row {row}: {wrong}" if wrong else ""

    def gpu_memory(self) -> Mapping[str, float]:
        return self._gpu.used_mib()

    def close(self) -> Statistics:
        statistics = self._indexer.statistics
        self._graphs.clear()
        self._indexer.close()
        del self._indexer
        self._gpu.give_back()
        return statistics

    def free(self) -> None:
        self._caches.clear()
        self._gpu.give_back()


def layer_times(stamps: Sequence[Sequence[int]]) -> list[int]:
    """Nanoseconds from each layer's staging to the next one's, of the last one until its answer is
    handed back; NO_TIME where a stage was not reached.

    Args:
        stamps: [layers][WorkerStage], ns of the GPU's clock.
    """
    begun = [row[WorkerStage.STAGE_BEGUN] for row in stamps]
    ended = [*begun[1:], stamps[-1][WorkerStage.HANDED_BACK]]
    return [
        after - before if before and after > before else NO_TIME
        for before, after in zip(begun, ended, strict=True)
    ]
