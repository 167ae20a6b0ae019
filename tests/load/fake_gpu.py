"""A GPU of a load test's session that is none: what `Cuda` and `DeviceIndexer` promise, on the CPU.

What depends on CUDA alone is missing; when it is asked for wrongly (a step without `begin_step`, a
graph that was captured for fewer rows, attaching before the kernels are warm), it says so.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.load.gpu_worker import GpuWorker
from dsa_indexer_cli.load.messages import Order
from indexer_client import ClientSettings, StepInputs
from indexer_client.statistics import Statistics
from indexer_service.kernels import k_cache
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import WORKER_STAGES, WorkerStage

LAYER_NANOSECONDS = 7_000
FORWARD_NANOSECONDS = 50_000
STEP_SECONDS = 0.01
"""Long enough that looks, which come by time, are many in a few steps."""
INLINE_EVERY = 5
"""Of the layers of one step in so many the service answers all but one, if it is `forgetful`."""


class FakeIndexer:
    """Answers by the reference; `plant` does something to each answer."""

    def __init__(
        self,
        geometry: HandoffGeometry,
        k_caches: Mapping[int, Tensor],
        settings: ClientSettings,
        plant: Callable[[Tensor], None],
        *,
        is_forgetful: bool = False,
    ) -> None:
        self.placement = settings.placement
        self.placement_reason = f"placement {settings.placement}: a fake"
        self.reasons: tuple[str, ...] = ()
        self._geometry, self._k_caches = geometry, k_caches
        self._selector = InlineSelector(k_caches, geometry.top_k)
        self._plant, self._is_forgetful = plant, is_forgetful
        self._steps = self._answered = 0
        self._inputs: StepInputs | None = None
        self._captures_rows = 0
        self._is_warm = self._is_attached = self._is_closed = False

    @property
    def statistics(self) -> Statistics:
        return Statistics(steps=self._steps, answered_layers=self._answered)

    def warm_up(
        self, next_n: Sequence[int], *, progress: Callable[[int, int, str], None] | None = None
    ) -> None:
        assert next_n and progress is not None
        progress(0, 1, "a fake kernel")
        self._is_warm = True

    def insert(self, k: Tensor, slots: Tensor, layer: int) -> None:
        k_cache.insert(k, slots, self._k_caches[layer])

    def start(self) -> None:
        assert self._is_warm, "kernels are made before a service is looked for"

    def wait_attached(self, seconds: float) -> None:
        assert self.placement != "inline", "nobody will come"
        self._is_attached = True

    def begin_step(self, inputs: StepInputs) -> int:
        assert not self._is_closed
        inputs.check(self._geometry)
        self._inputs = inputs
        self._steps += 1
        if self._is_attached:
            lost = self._is_forgetful and self._steps % INLINE_EVERY == 0
            self._answered += len(self._geometry.layers) - lost
        return self._steps

    def begin_inline(self, rows: int, rows_per_decode: int = 1) -> None:
        assert rows % rows_per_decode == 0
        self._inputs, self._captures_rows = None, rows

    def select(self, layer: int, q: Tensor, weights: Tensor, out: Tensor) -> None:
        if self._inputs is None:
            assert len(q) == self._captures_rows > 0
            return
        rows = self._inputs.rows
        assert len(q) == len(weights) == len(out) >= rows, "a graph of fewer rows than the step's"
        self._selector(layer, q[:rows], weights[:rows], self._inputs, out[:rows])
        out[rows:] = -1
        self._plant(out)

    def stamps(self, step: int) -> Sequence[Sequence[int]] | None:
        assert step == self._steps
        found = []
        for ordinal in range(len(self._geometry.layers)):
            row = [0] * len(WORKER_STAGES)
            row[WorkerStage.STAGE_BEGUN] = 1 + ordinal * LAYER_NANOSECONDS
            row[WorkerStage.HANDED_BACK] = row[WorkerStage.STAGE_BEGUN] + LAYER_NANOSECONDS
            found.append(row)
        return found

    def close(self) -> None:
        self._is_closed = True


class FakeGpu:
    """Args:
    plant: done to each answer.
    is_forgetful: some layers are not answered by the service.
    grows_mib: the GPU's memory, with each look at it.
    """

    def __init__(
        self,
        plant: Callable[[Tensor], None] = lambda _: None,
        *,
        is_forgetful: bool = False,
        grows_mib: float = 0.0,
        free_bytes: int = 4 << 30,
    ) -> None:
        self.device = torch.device("cpu")
        self._plant, self._is_forgetful = plant, is_forgetful
        self._grows, self._used, self._free = grows_mib, 1000.0, free_bytes
        self.captured = 0
        self.indexers: list[FakeIndexer] = []

    def indexer(
        self, geometry: HandoffGeometry, k_caches: Mapping[int, Tensor], settings: ClientSettings
    ) -> FakeIndexer:
        made = FakeIndexer(
            geometry, k_caches, settings, self._plant, is_forgetful=self._is_forgetful
        )
        self.indexers.append(made)
        return made

    def free_bytes(self) -> int:
        return self._free

    def used_mib(self) -> dict[str, float]:
        self._used += self._grows
        return {"GPU 0": self._used}

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        forward()
        self.captured += 1
        return forward

    def timed(self, enqueue: Callable[[], None]) -> int:
        enqueue()
        time.sleep(STEP_SECONDS)
        return FORWARD_NANOSECONDS

    def synchronize(self) -> None:
        pass

    def give_back(self) -> None:
        pass


def good(order: Order) -> GpuWorker:
    return GpuWorker(order, FakeGpu())


def bad(order: Order) -> GpuWorker:
    """The first index of one answer in four is another one, some layers are not answered, and the
    GPU's memory grows.
    """
    answers = []

    def plant(out: Tensor) -> None:
        answers.append(len(out))
        if len(answers) % 4 == 0:
            out[0, 0] += 1

    return GpuWorker(order, FakeGpu(plant, is_forgetful=True, grows_mib=30.0))


def full(order: Order) -> GpuWorker:
    return GpuWorker(order, FakeGpu(free_bytes=1 << 20))
