"""An engine that a test can hold, and a service in this process that says what it did."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, Session, Source
from indexer_client import step as client_step
from indexer_client.attachment import Attachment
from indexer_client.step import Step
from indexer_client.waiting import WaitEnd
from indexer_service import step_executor
from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.cpu import CpuEngine
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.settings import Settings
from ipc_handoff.findings import FindingListener
from tests.service.support import LocalService
from tests.service.support import running as service_running
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Case, Checker, RandomSteps, Shape

_WORKSPACE = 1 << 24


class HeldEngine(CpuEngine):
    """The CPU engine; while it is held, a selection waits before it computes and writes.

    Attributes:
        waiting: set while a selection is held.
        fail: raises in the middle of a selection.
        ended: selections that were held and have written what they will ever write.
    """

    def __init__(self) -> None:
        super().__init__(EngineSettings(_WORKSPACE, 1))
        self._go = threading.Event()
        self._go.set()
        self.waiting = threading.Event()
        self.fail = False
        self.ended = 0

    def hold(self) -> None:
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        held = not self._go.is_set()
        if held:
            self.waiting.set()
            assert self._go.wait(2 * SOON)
            self.waiting.clear()
        if self.fail:
            raise RuntimeError("planted")
        try:
            super().select(inputs, top_k, out, on_stage)
        finally:
            self.ended += held


class Reports(StepObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.found: list[pb.StepReport] = []
        self.times: list[Sequence[Sequence[int]] | None] = []

    def step_finished(self, step: FinishedStep) -> None:
        self.found.append(step.report)
        self.times.append(step.times)

    def of(self, step: int) -> pb.StepReport:
        """The report of a step, once it has come."""
        assert eventually(lambda: any(report.step == step for report in self.found))
        return next(report for report in self.found if report.step == step)


class Pair:
    """A service and a session with it, in this process."""

    def __init__(self, service: LocalService, session: Session, steps: RandomSteps) -> None:
        self.service, self.session, self.steps = service, session, steps
        self.checker = Checker()
        self.engine: HeldEngine
        self.reports: Reports
        self.number = 0

    def case(self, **wanted: Any) -> Case:
        self.number += 1
        return self.steps.case(self.number, **wanted)

    def step(self, **wanted: Any) -> list[Source]:
        """One more whole step, checked; where its layers came from."""
        case = self.case(**wanted)
        with self.session.step(case.inputs, case.layers) as step:
            self.checker.run(step, case)
        return self.checker.last

    def ask(self, step: Step, case: Case, layer: int) -> tuple[Source, torch.Tensor]:
        """One layer, not checked."""
        query = case.queries[layer]
        out = torch.full_like(case.expected[layer], -2)
        return step.select(layer, query.q, query.weights, out=out), out

    @contextmanager
    def impatient(self, bound: float = 0.2) -> Iterator[None]:
        """Waits for a service that is held end after `bound`.

        They begin once it is there, so that how far it came is the same on every machine.
        """
        wait = client_step.wait_for_answer

        def once_held(attachment: Attachment, layer: int, step: int, _: float) -> WaitEnd:
            assert self.engine.waiting.wait(SOON)
            return wait(attachment, layer, step, bound)

        with patch.object(client_step, "wait_for_answer", once_held):
            yield

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """The service is held in the middle of a selection, for longer than anybody waits."""
        self.engine.hold()
        try:
            with self.impatient():
                yield
        finally:
            self.engine.release()

    def pause(self) -> None:
        """As a worker that pauses in a step for longer than the gates wait."""
        attachment, step = self.session._attachment, self.session._steps
        assert attachment is not None

        def is_given_up() -> bool:
            attachment.wake_service.ring()  # it sleeps by another clock
            return attachment.bells.is_cancelled(step)

        with self.hurried_gates():
            assert eventually(is_given_up)

    @contextmanager
    def hurried_gates(self) -> Iterator[None]:
        """The service's gates end when they next look at their clock, which runs a million times as
        fast; no other does.
        """
        began = time.monotonic()
        fast = SimpleNamespace(monotonic=lambda: began + 1e6 * (time.monotonic() - began))
        with patch.object(step_executor, "time", fast):
            yield

    @property
    def wrong(self) -> list[str]:
        return self.checker.wrong


def patient_service(address: str, **changes: Any) -> Settings:
    """A service's settings: nothing ends because a thread of this machine stood still."""
    bounds = {"gate_bound_seconds": SOON, "lease_seconds": 2 * SOON}
    return Settings(address=address, **{**bounds, **changes})


def patient_client(address: str, **changes: Any) -> ClientSettings:
    """A session's settings of the same kind."""
    bounds = {"wait_bound_seconds": SOON, "rpc_timeout_seconds": SOON, "reattach_seconds": 0.2}
    return ClientSettings(address=address, **{**bounds, **changes})


@contextmanager
def pair(
    folder: Path,
    *,
    shape: Shape | None = None,
    seed: int = 1,
    client: dict[str, Any] | None = None,
    observer: Any = None,
    tracing: Any = None,
    metrics: Any = None,
    step_metrics: Any = None,
    worker_finds: FindingListener | None = None,
    service_finds: FindingListener | None = None,
    **settings: Any,
) -> Iterator[Pair]:
    """An attached pair; `settings` are the service's, `client` the session's; `*_finds` are told
    what each side finds.

    Nothing ends for want of time, however long a thread stands still: a test that is about a bound
    asks for a short one.

    Args:
        metrics: the session's; step_metrics: the service's.
    """
    engine, reports = HeldEngine(), Reports()
    wanted = patient_service(f"unix:{folder / 'd' / 'i.sock'}", **settings)
    steps = RandomSteps(shape or Shape(), seed)
    parts = {
        "engine": engine,
        "observer": observer or reports,
        "metrics": step_metrics,
        "findings": service_finds,
    }
    with service_running(wanted, **parts) as service:
        of_client = patient_client(service.address, **(client or {}))
        with Session(
            steps.geometry,
            steps.k_caches,
            steps.fallback,
            settings=of_client,
            tracing=tracing,
            metrics=metrics,
            findings=worker_finds,
        ) as session:
            session.wait_attached(SOON)
            made = Pair(service, session, steps)
            made.engine, made.reports = engine, reports
            try:
                yield made
            finally:
                engine.release()
    steps.close()
