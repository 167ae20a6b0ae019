"""A service's executor and its worker, interpreted; TRITON_INTERPRET is set before the import."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service import step_kernels
from indexer_service.attachment import Attachment
from indexer_service.device_executor import DeviceExecutor
from indexer_service.engine import EngineSettings
from indexer_service.engines.triton import TritonEngine
from indexer_service.executor import StepCancelled
from indexer_service.session_regions import DeviceViews
from indexer_service.step_kernels import tensor_at
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord
from ipc_handoff.kernels.words import Gate
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.wakeups import Wakeup
from tests.service.fake_stream import FakeStream
from tests.service.hand_worker import EPOCH, UNWRITTEN, HandStep, HandWorker
from tests.support.findings import Kept

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=64, top_k=24, page_size=64, max_rows=48, max_requests=6,
    max_context=384, slots=2,
)  # fmt: skip
CPU = torch.device("cpu")


class _Prepared(TritonEngine):
    """Nothing is compiled in the interpreter."""

    def prepare(self, *_: Any) -> None:
        pass


class Bench:
    """An executor and its worker, in one thread."""

    def __init__(self, gate_bound: float = 0.0, geometry: HandoffGeometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.worker = worker = HandWorker(geometry, CPU)
        attachment = Attachment(
            epoch=EPOCH, geometry=geometry, control=worker.service_control(),
            bank=DeviceViews(worker.staging, worker.answers), k_cache=worker.k_caches.get,
            wake_service=Wakeup(), wake_worker=Wakeup(),
        )  # fmt: skip
        assert isinstance(attachment.bank, DeviceViews)
        self.stream = FakeStream(CPU)
        self.found = Kept()
        self.executor = DeviceExecutor(
            attachment, attachment.bank, _Prepared(EngineSettings(1 << 20, 1, CPU)), gate_bound,
            True, lambda seconds: None, lambda: False, detection=self.found.detection,
            make_stream=lambda device: self.stream,  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        self.executor.prepare()

    def answers(self, step: int) -> torch.Tensor:
        """int32 [max_rows, top_k], of the step's slot."""
        g = self.geometry
        at = self.worker.answers + g.device.answers_at(step % g.slots)
        return tensor_at(at, (g.max_rows, g.top_k), torch.int32, CPU)

    def word(self, region: int, number: int) -> torch.Tensor:
        return tensor_at(region + number * DEVICE_LINE, (1,), torch.int64, CPU)

    def run(self, step: HandStep, *, staged: int | None = None) -> pb.StepReport:
        """Publish, stage `staged` layers (all), begin and finish; cancelled: see the report."""
        self.worker.publish(step)
        self.answers(step.plan.step).fill_(UNWRITTEN)
        with self.staging(step, staged):
            return self.finish(step)

    @contextmanager
    def staging(self, step: HandStep, staged: int | None = None) -> Iterator[None]:
        """The worker stages a layer when the service comes to its gate: a slot holds one."""
        real, ordinals = step_kernels.gate, range(len(GEOMETRY.layers))[:staged]

        def gate(memory: Any, kind: Gate, *, ordinal: int = 0, **options: Any) -> None:
            if kind is not Gate.PUBLISHED and ordinal in ordinals:
                self.worker.stage(step, ordinal)
            real(memory, kind, ordinal=ordinal, **options)

        with patch.object(step_kernels, "gate", gate):
            yield

    def finish(self, step: HandStep) -> pb.StepReport:
        report = pb.StepReport(step=step.plan.step)
        begun = self.executor.begin(step.plan, report)
        assert begun.is_finished()
        try:
            begun.finish()
        except StepCancelled as error:
            report.message = str(error)
        return report

    def check(self, step: HandStep, report: pb.StepReport) -> None:
        """The last layer's answer is right, and every bell has rung."""
        assert not report.message, report.message
        assert list(report.answered_layers) == list(step.plan.layers)
        last = len(GEOMETRY.layers) - 1
        expected = self.worker.expected(step, last, "reference")
        ours = self.answers(step.plan.step)
        assert torch.equal(ours[: step.plan.rows], expected)
        for ordinal in range(last + 1):
            assert (
                int(self.word(self.worker.answers, AnswersWord.DONES + ordinal)) == step.plan.step
            )
