"""Steps that end otherwise than planned: closed in two ways at once, or overtaken."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service import step_executor
from indexer_service.engine import EngineSettings, create_engine
from indexer_service.errors import ServiceError
from indexer_service.events import FinishedStep, StepObserver
from indexer_service.runner import RunnerSettings
from indexer_service.session_regions import SessionRegions
from indexer_service.session_steps import SessionSteps, StepResources
from indexer_service.settings import Settings
from ipc_handoff.layout import RING_CAPACITY
from ipc_handoff.stamps import StampRing
from tests.service.support import GEOMETRY, LocalService, Worker, running
from tests.support.waiting import SOON, eventually


def test_a_slot_that_a_newer_step_took_is_no_fault_of_the_older(
    worker: Worker, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy: Callable[..., Any] = step_executor.copy_inputs

    def overtaken(plan: pb.StepPlan, slot: Any, *rest: Any) -> Any:
        slot_of_both = worker.bank.staging[GEOMETRY.staging.slot_of(plan.step)]
        slot_of_both.seq_lens.fill_(-1)
        worker.bank.control.bells.publish(plan.step + GEOMETRY.slots)
        return copy(plan, slot, *rest)

    plan = worker.plan()
    worker.stage(plan)
    with monkeypatch.context() as patched:
        patched.setattr(step_executor, "copy_inputs", overtaken)
        report = worker.select(plan)
    assert report.status == pb.STEP_STATUS_CANCELLED
    assert str(plan.step + GEOMETRY.slots) in report.message
    assert (report.fault_count, list(report.faults)) == (0, [])
    shown = next(s for s in service.status().sessions if s.epoch == worker.epoch)
    assert shown.faulted_rows == 0


def test_a_runner_that_finishes_can_still_be_hurried(settings: Settings) -> None:
    """The second close must not wait behind the first, which waits for the step."""
    service = LocalService(settings.model_copy(update={"gate_bound_seconds": 2 * SOON})).start()
    worker = Worker(service).attach()
    call = worker.stub.SelectTopK.future(
        pb.SelectTopKRequest(session_id=worker.id, plan=worker.plan())
    )
    assert eventually(lambda: service.status().sessions[0].last_step == 1)
    assert service.service._table is not None
    runner = service.service._table.sessions[0]._steps._runner
    assert runner is not None
    finishing = threading.Thread(target=lambda: runner.close(finish=True), daemon=True)
    finishing.start()
    assert eventually(lambda: runner._close_lock.locked())
    hurrying = threading.Thread(target=runner.close, daemon=True)
    hurrying.start()
    for thread in (hurrying, finishing):
        thread.join(SOON)
        assert not thread.is_alive()
    assert call.result(SOON).report.status == pb.STEP_STATUS_CANCELLED
    assert worker.bank.control.bells.is_drained()
    service.stop()
    worker.leave()


class _Watcher(StepObserver):
    def step_finished(self, _: FinishedStep) -> None:
        pass


def test_status_counts_reports_and_stamps_that_were_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(settings, observer=_Watcher()) as service:
        worker = Worker(service).attach()
        lost = 3
        for step in range(RING_CAPACITY + lost):
            if step == RING_CAPACITY:
                monkeypatch.setattr(StampRing, "begin", lambda *_: None)
            plan = worker.plan()
            worker.bank.control.plans.post(plan.SerializeToString())
            worker.stage(plan)
            assert eventually(lambda: service.status().sessions[0].answered_steps == worker.step)
        assert eventually(lambda: service.status().sessions[0].lost_stamps == lost)
        shown = service.status().sessions[0]
        assert (shown.lost_reports, shown.cancelled_steps) == (lost, 0)
        worker.leave()


class _Vanishing(SessionSteps):
    """Its runner is taken away right after somebody looked."""

    looks = 0

    @property
    def _runner(self) -> Any:
        self.looks += 1
        if self.looks > 1:
            return None
        self._is_over = True
        return object()

    @_runner.setter
    def _runner(self, runner: Any) -> None:
        pass


def test_a_plan_that_comes_while_the_attachment_ends_is_refused() -> None:
    resources = StepResources(
        create_engine("auto", EngineSettings(1 << 20, 1)), RunnerSettings(1.0, 1), None
    )
    regions = SessionRegions(GEOMETRY, 1, None)
    steps = _Vanishing(resources, regions, GEOMETRY, 1, None, use_ring=False)
    with pytest.raises(ServiceError, match="given back") as caught:
        steps.submit(pb.StepPlan(step=1, epoch=1), lambda report: None)
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
