"""A runner on a real GPU and a worker by hand beside it, in one process, each on its own stream."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from indexer_service.device_executor import DeviceExecutor
from indexer_service.device_stream import DeviceStream
from indexer_service.engines.triton import TritonEngine
from indexer_service.events import StepObserver
from indexer_service.runner import RunnerSettings, StepRunner
from indexer_service.session_regions import DeviceViews
from indexer_service.step_kernels import tensor_at
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.kernels.hand_back import hand_back
from ipc_handoff.kernels.wait import wait
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.wakeups import Wakeup
from tests.service.hand_worker import EPOCH, UNWRITTEN, HandStep, HandWorker
from tests.support.waiting import eventually

GEOMETRY = HandoffGeometry(
    layers=(0, 1, 4), heads=64, head_dim=128, top_k=2048, page_size=64, max_rows=160,
    max_requests=64, max_context=8192, slots=2,
)  # fmt: skip
SECOND = 1_000_000_000


class CountingStream(DeviceStream):
    """Attributes:
    graphs: captured; launched: launches of them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.graphs, self.launched = 0, 0

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(launch)
        self.graphs += 1

        def counted() -> None:
            self.launched += 1
            replay()

        return counted


class GpuBench:
    """Args:
    engine: shared: what it prepared once is prepared.
    gate_bound: seconds.
    """

    def __init__(
        self,
        engine: TritonEngine,
        *,
        geometry: HandoffGeometry = GEOMETRY,
        gate_bound: float = 10.0,
        observer: StepObserver | None = None,
        pages: int = 256,
    ) -> None:
        device = engine.device
        self.geometry, self.device = geometry, device
        self.bank = DeviceBank(geometry, 0, device.index, device.index)
        self.worker = HandWorker(
            geometry, device, addresses=(self.bank.staging_address, self.bank.answers_address),
            pages=pages,
        )  # fmt: skip
        self.work = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.streams: list[CountingStream] = []
        self.reports: list[pb.StepReport] = []
        self.k_caches: dict[int, Tensor] = self.worker.k_caches
        bank = DeviceViews(self.bank.staging_address, self.bank.answers_address)
        attachment = Attachment(
            epoch=EPOCH, geometry=geometry, control=self.worker.service_control(), bank=bank,
            k_cache=lambda layer: self.k_caches.get(layer), wake_service=Wakeup(),
            wake_worker=Wakeup(),
        )  # fmt: skip
        make = partial(
            DeviceExecutor, attachment, bank, engine, gate_bound, observer is not None,
            make_stream=self._make_stream,
        )  # fmt: skip
        self.attachment = attachment
        self.runner = StepRunner(
            attachment, make, RunnerSettings(gate_bound, 64), use_ring=True, observer=observer
        )
        self._load_workers_kernels()
        self.runner.start()
        assert self.runner.wait_until_ready(300)
        assert not self.runner.ended

    def _load_workers_kernels(self) -> None:
        """Loading waits for every kernel of the process, and a gate would wait for what is loaded.
        Two processes do not know that.
        """
        self.forward(self.worker.make([1], [1]), bound=0.0)
        self.work.synchronize()
        self.worker.memory.state.zero_()
        self.worker.memory.told.zero_()
        self.worker.steps = 0
        self.bank.clear()
        torch.cuda.current_stream(self.device).synchronize()

    def _make_stream(self, device: torch.device) -> DeviceStream:
        self.streams.append(CountingStream(device))
        return self.streams[-1]

    @property
    def stream(self) -> CountingStream:
        """Of the graphs."""
        return self.streams[1]

    def submit(self, step: HandStep) -> None:
        self.runner.submit(step.plan, self.reports.append)

    def post(self, step: HandStep) -> None:
        """Through the ring, as a worker does."""
        self.worker.control.plans.post(step.plan.SerializeToString())
        self.attachment.wake_service.ring()

    def forward(self, step: HandStep, bound: float = 10.0) -> Tensor:
        """Launch a forward of the step on the worker's stream; int32 [layers, rows, top_k].

        Layers that are not answered stay UNWRITTEN.
        """
        g = self.geometry
        shape = (len(g.layers), step.plan.rows, g.top_k)
        with torch.cuda.stream(self.work):
            out = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=self.device)
            self.worker.publish(step)
            self.layers(step, out, bound)
        return out

    def layers(self, step: HandStep, out: Tensor, bound: float = 10.0) -> None:
        """On the current stream."""
        for ordinal in range(len(self.geometry.layers)):
            self.worker.stage(step, ordinal)
            wait(self.worker.memory, ordinal=ordinal, bound=int(bound * SECOND))
            hand_back(self.worker.memory, out[ordinal], ordinal=ordinal)

    def check(self, step: HandStep, out: Tensor) -> None:
        """Bit for bit what the worker would have selected by itself."""
        self.work.synchronize()
        with torch.cuda.stream(self.work):
            for ordinal in range(len(self.geometry.layers)):
                expected = self.worker.expected(step, ordinal, "triton")
                assert torch.equal(out[ordinal], expected), f"layer {ordinal}"

    def report_of(self, step: HandStep) -> pb.StepReport:
        """Waits for it."""
        number = step.plan.step
        assert eventually(lambda: any(r.step == number for r in list(self.reports)), 20)
        return next(report for report in self.reports if report.step == number)

    def ring(self, region: int, number: int, value: int) -> None:
        """Write a word, as the worker's kernels do."""
        with torch.cuda.stream(self.work):
            tensor_at(region + number * DEVICE_LINE, (1,), torch.int64, self.device).fill_(value)
        self.work.synchronize()

    def close(self) -> int:
        cancelled = self.runner.close()
        self.work.synchronize()
        return cancelled
