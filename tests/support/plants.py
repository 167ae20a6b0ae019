"""An engine that a test can hold, and a service in this process that says what it did."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, Session, Source
from indexer_client.step import Step
from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.cpu import CpuEngine
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.settings import Settings
from ipc_handoff.findings import FindingListener
from tests.service.support import LocalService
from tests.service.support import running as service_running
from tests.support.waiting import eventually
from tests.support.workloads import Case, Checker, RandomSteps, Shape

SOON = 10.0
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
            assert self._go.wait(30)
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

    @property
    def wrong(self) -> list[str]:
        return self.checker.wrong


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

    Args:
        metrics: the session's; step_metrics: the service's.
    """
    engine, reports = HeldEngine(), Reports()
    wanted = Settings(
        address=f"unix:{folder / 'd' / 'i.sock'}", **{"gate_bound_seconds": 1.0, **settings}
    )
    steps = RandomSteps(shape or Shape(), seed)
    asked = {"wait_bound_seconds": 2.0, "rpc_timeout_seconds": 3.0, "reattach_seconds": 0.2}
    parts = {
        "engine": engine,
        "observer": observer or reports,
        "metrics": step_metrics,
        "findings": service_finds,
    }
    with service_running(wanted, **parts) as service:
        of_client = ClientSettings(address=service.address, **{**asked, **(client or {})})
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
