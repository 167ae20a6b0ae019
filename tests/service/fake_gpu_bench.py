"""A runner on a fake GPU: launches are recorded, and are done when the test says so."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from indexer_service.device_executor import DeviceExecutor
from indexer_service.engine import EngineSettings
from indexer_service.engines.triton import TritonEngine
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.executor import StepCancelled
from indexer_service.runner import RunnerSettings, StepRunner
from indexer_service.session_regions import DeviceViews
from indexer_service.step_graphs import buckets
from indexer_service.step_kernels import STEP_WORDS, LaunchShape, StepKernels, nan_words
from ipc_handoff.kernels.words import GateEnd, Live
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.telemetry.attributes import Times
from ipc_handoff.wakeups import Wakeup
from tests.service.fake_stream import FakeStream
from tests.service.hand_worker import EPOCH, HandWorker
from tests.support.waiting import eventually

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=64, top_k=24, page_size=64, max_rows=48, max_requests=6,
    max_context=384, slots=3,
)  # fmt: skip
CPU = torch.device("cpu")


class Engine(TritonEngine):
    """Prepares one row a request at once; more when the test says so."""

    def __init__(self) -> None:
        super().__init__(EngineSettings(1 << 20, 1, CPU))
        self.may_prepare = threading.Event()
        self.stopped, self.tries = 0, 0
        self.breaks: Exception | None = None

    def prepare(
        self, geometry: Any, caches: Any, rows_per_decode: int, is_closing: Callable[[], bool]
    ) -> None:
        while rows_per_decode > 1 and not self.may_prepare.wait(0.01):
            if is_closing():
                self.stopped += 1
                raise StepCancelled("closing")
        if rows_per_decode > 1:
            self.tries += 1
            if self.breaks is not None:
                raise self.breaks


class Watcher(StepObserver):
    """Keeps the times of steps."""

    def __init__(self) -> None:
        self.times: list[Times | None] = []

    def step_finished(self, step: FinishedStep) -> None:
        self.times.append(step.times)


_LIVE = slice(nan_words(len(GEOMETRY.layers)), nan_words(len(GEOMETRY.layers)) + len(Live))


class Bench:
    """A runner with a fake GPU, and what it reported, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[int, LaunchShape]] = []
        self.fails: Exception | None = None
        self.given_up: list[int] = []
        bench = self

        def launch(kernels: StepKernels, shape: LaunchShape, caches: Any, *_: Any) -> None:
            if bench.fails is not None:
                raise bench.fails
            step = int(kernels.plan[:STEP_WORDS].view(torch.int64))
            bench.launches.append((step, shape))
            live = kernels.result[_LIVE]
            live[Live.LIVE], live[Live.REASON] = 1, GateEnd.PASSED
            live[Live.ANSWERED] = len(shape.ordinals)

        monkeypatch.setattr(StepKernels, "launch", launch)
        monkeypatch.setattr(StepKernels, "give_up", lambda _, step: self.given_up.append(step))
        self.worker = worker = HandWorker(GEOMETRY, CPU)
        self.stream = FakeStream(CPU)
        self.engine = Engine()
        self.watcher = Watcher()
        self.lost = threading.Event()
        self.k_caches: dict[int, torch.Tensor] = worker.k_caches
        bank = DeviceViews(worker.staging, worker.answers)
        attachment = Attachment(
            epoch=EPOCH, geometry=GEOMETRY, control=worker.service_control(), bank=bank,
            k_cache=lambda layer: self.k_caches.get(layer), wake_service=Wakeup(),
            wake_worker=Wakeup(),
        )  # fmt: skip
        make = partial(
            DeviceExecutor, attachment, bank, self.engine, 1.0, False,
            make_stream=lambda device: self.stream,  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        self.runner = StepRunner(
            attachment, make, RunnerSettings(1.0, 16), use_ring=True,
            observer=self.watcher, on_device_lost=self.lost.set,
        )  # fmt: skip
        self.reports: list[pb.StepReport] = []
        self.runner.start()
        assert self.runner.wait_until_ready(10)
        self.graphs = len(buckets(1, GEOMETRY)) * GEOMETRY.slots
        assert self.stream.captured == self.graphs
        assert [step for step, _ in self.launches] == [0]  # what made the kernels
        self.launches.clear()

    def gates_end(self, end: GateEnd) -> None:
        """As results of the steps in flight arrive when their gates have ended so."""
        for memory in self.stream.memory:
            memory[_LIVE] = 0
            memory[_LIVE][Live.REASON] = end

    def submit(self, **plan: Any) -> int:
        step = self.worker.make([1, 1], [100, 50], **plan)
        self.runner.submit(step.plan, self.reports.append)
        return int(step.plan.step)

    def reported(self, *steps: int) -> list[str]:
        """Waits until exactly these are reported; their statuses."""
        assert eventually(lambda: len(self.reports) >= len(steps))
        assert [report.step for report in self.reports] == list(steps)
        return [pb.StepStatus.Name(report.status)[12:] for report in self.reports]

    def begun(self, *steps: int) -> None:
        """Waits until exactly these are launched."""
        assert eventually(lambda: len(self.launches) >= len(steps))
        self.settle()
        assert [step for step, _ in self.launches] == list(steps)

    def settle(self) -> None:
        """The runner has looked around, and done what it would do."""
        threading.Event().wait(0.05)
