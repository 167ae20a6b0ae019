"""A worker that lives beside services that come and go, and what became of each of its steps."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attention_worker.device_session import DeviceIndexer
from ipc_handoff.banks import ANSWERS, STAGING
from ipc_handoff.regions import TensorSpec
from tests.attention_worker.gpu_steps import GpuCase, GpuSteps, wrong
from tests.attention_worker.gpu_worker import Captured
from tests.attention_worker.services import READY_SECONDS, Services

REQUESTS = 8
POISON = 0xAB


def poison(indexer: DeviceIndexer) -> None:
    """Fill all free banks: what was never written must not look like an answer."""
    for bank in list(indexer._caretaker._pool._free):
        for name in (STAGING, ANSWERS):
            memory = bank.memories[name]
            spec = TensorSpec((memory.byte_size,), torch.uint8)
            tensor = memory.tensor(0, memory.byte_size, spec, name)
            tensor.fill_(POISON)
            torch.cuda.synchronize(tensor.device)


class Forward(Captured):
    """One FULL graph: each layer inserts the step's keys, and selects."""

    def __init__(self, indexer: DeviceIndexer, steps: GpuSteps, requests: int) -> None:
        geometry, kind = steps.geometry, {"device": steps.device}
        self._session = indexer
        self._keys = {
            layer: torch.zeros((requests, geometry.head_dim), dtype=torch.bfloat16, **kind)
            for layer in geometry.layers
        }
        self._slots = torch.full((requests,), -1, dtype=torch.int64, **kind)
        super().__init__(indexer, steps, requests, 1)

    def _forward(self) -> None:
        for layer, q in self.q.items():
            self._session.insert(self._keys[layer], self._slots, layer)
            self._session.select(layer, q, self.weights[layer], self.out[layer])

    def replay(self, case: GpuCase) -> None:
        self._slots.fill_(-1)
        self._slots[: len(case.slots)].copy_(case.slots)
        for layer, keys in case.keys.items():
            self._keys[layer][: len(keys)].copy_(keys)
        super().replay(case)


@dataclass
class Worker:
    """Args:
    steps: with K caches of its own, which get the same keys.

    Attributes:
    wrong: a line for every selection that was not as expected.
    times: ms of each step, from its launch to its end.
    answered: layers of each step that the service answered.
    ended: when the last one did.
    """

    indexer: DeviceIndexer
    steps: GpuSteps
    services: Services
    captured: Forward
    wrong: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    ended: float = 0.0
    _number: int = 0

    def step(
        self,
        *,
        gated: Callable[[], None] = lambda: None,
        running: Callable[[], None] = lambda: None,
        between: Callable[[], None] | None = None,
        prefill: bool = False,
    ) -> None:
        """One step of new data.

        Args:
            gated: called when it is published, and the service waits for its first layer.
            running: called in another thread while it is launched and runs.
            between: called behind the first layer. The step is eager then, also with `prefill`.
        """
        self._number += 1
        before = self.indexer.statistics.answered_layers
        if prefill:
            case = self.steps.case(self._number, 2, prefill=(17, 60))
        else:
            case = self.steps.case(self._number, 1 + self._number % REQUESTS)
        self.indexer.begin_step(case.inputs)
        torch.cuda.synchronize()
        gated()
        beside = threading.Thread(target=running)
        beside.start()
        began = time.perf_counter()
        if prefill or between is not None:
            found = self._eager(case, between)
            torch.cuda.synchronize()
            bad = wrong(case, found)
        else:
            self.captured.replay(case)
            torch.cuda.synchronize()
            bad = self.captured.wrong(case)
        self.ended = time.perf_counter()
        self.times.append((self.ended - began) * 1e3)
        self.wrong += [f"step {self.indexer._steps}, {line}" for line in bad]
        beside.join()
        self.answered.append(self.indexer.statistics.answered_layers - before)

    def _eager(self, case: GpuCase, between: Callable[[], None] | None) -> dict[int, torch.Tensor]:
        found = {}
        for layer, q in case.q.items():
            out = torch.full_like(case.expected[layer], -2)
            self.indexer.insert(case.keys[layer], case.slots, layer)
            self.indexer.select(layer, q, case.weights[layer], out)
            found[layer] = out
            if between is not None:
                torch.cuda.synchronize()
                between()
                between = None
        return found

    def many(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def attach(self) -> float:
        """Wait for the service; the seconds that it took from when it serves."""
        began = time.monotonic()
        self.indexer.wait_attached(READY_SECONDS)
        return round(time.monotonic() - began, 3)
