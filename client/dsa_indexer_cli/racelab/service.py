"""A service and its worker in one process: the lab must take guards of both away."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

import torch

from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.cpu import CpuEngine
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.server import Service
from indexer_service.settings import Settings
from ipc_handoff.findings import Finding

_WORKSPACE = 1 << 22
_CALL_SECONDS = 120.0


class Collected:
    """A listener of one side that keeps what it is told."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.findings: list[Finding] = []

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)


class FinishedSteps(StepObserver):
    """Can be waited for. What the service finds, it has told before."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._changed = threading.Condition()

    def step_finished(self, step: FinishedStep) -> None:
        with self._changed:
            self._newest[step.plan.epoch] = step.plan.step
            self._changed.notify_all()

    def wait(self, epoch: int, step: int, seconds: float) -> bool:
        """Whether the service has finished this step, or a later one of the epoch."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest.get(epoch, 0) >= step, seconds)


class LabEngine(CpuEngine):
    """The CPU engine; `before` is called once, before the next selection."""

    def __init__(self) -> None:
        super().__init__(EngineSettings(_WORKSPACE, 1))
        self.before: Callable[[], None] | None = None

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()
        super().select(inputs, top_k, out, on_stage)


class LabService:
    """A service on an event loop of its own, in a thread of this process."""

    def __init__(self, settings: Settings, **parts: Any) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service: Service = self._call(_make(settings, parts))

    def start(self) -> Self:
        self._call(self.service.start())
        return self

    @property
    def address(self) -> str:
        return self.service.address

    def stop(self) -> None:
        self._call(self.service.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_SECONDS)


async def _make(settings: Settings, parts: dict[str, Any]) -> Service:
    return Service(settings, **parts)
