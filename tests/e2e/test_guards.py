"""Each guard of the hand-over, and what happens without it: a check that turns red."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import Source, staging
from indexer_client import step as client_step
from indexer_client.step import Step
from indexer_client.waiting import WaitEnd
from indexer_service.executor import StepCancelled
from indexer_service.session_steps import SessionSteps
from indexer_service.step_executor import StepExecutor
from ipc_handoff.banks import BankPool
from ipc_handoff.doorbells import ServiceBells, WorkerBells
from tests.service.support import running as service_running
from tests.support.plants import HeldEngine, Pair, Settings, pair
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Shape

Patch = pytest.MonkeyPatch
STEPS = 8
# They would keep wrong answers from the caller where a guard is taken away.
WITHOUT_DETECTORS: dict[str, Any] = {"detectors": "none", "client": {"detectors": "none"}}


def _slow_publishing(patch: Patch) -> None:
    """The service has the plan long before the lengths and tables of its step are staged."""
    publish = staging.publish

    def later(*arguments: object) -> None:
        time.sleep(0.05)
        publish(*arguments)  # type: ignore[arg-type]

    patch.setattr(client_step, "publish", later)


def _slow_requests(patch: Patch) -> None:
    """The service reaches each layer's gate long before its q is staged."""
    stage_layer = staging.stage_layer

    def later(*arguments: object) -> None:
        time.sleep(0.05)
        stage_layer(*arguments)  # type: ignore[arg-type]

    patch.setattr(client_step, "stage_layer", later)


def _any_step_passes(patch: Patch, word: str) -> None:
    """A gate that asks whether something was rung, not whether it was this step."""
    real = StepExecutor._gate

    def gate(
        executor: StepExecutor, plan: object, layer: int | None, load: Callable[[], int]
    ) -> None:
        if getattr(getattr(load, "func", load), "__name__", "") != word:
            real(executor, plan, layer, load)  # type: ignore[arg-type]
            return
        while not load():
            time.sleep(0.001)

    patch.setattr(StepExecutor, "_gate", gate)


def _run(running: Pair, steps: int = STEPS) -> None:
    for _ in range(steps):
        running.step()


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "planted"])
@pytest.mark.parametrize("word", ["published", "requested"])
def test_a_gate_lets_only_its_own_step_pass(
    word: str, guarded: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    {"published": _slow_publishing, "requested": _slow_requests}[word](monkeypatch)
    if not guarded:
        _any_step_passes(monkeypatch, word)
    with pair(tmp_path, shape=Shape(slots=1), **WITHOUT_DETECTORS) as running:
        _run(running)
        assert bool(running.wrong) is not guarded
        if guarded:
            assert not running.session.statistics.inline_layers


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "planted"])
def test_an_answer_counts_only_when_its_own_step_is_done(
    guarded: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    if not guarded:
        monkeypatch.setattr(
            WorkerBells, "is_done", lambda bells, layer, step: bells._dones.load(layer) != 0
        )
    with pair(tmp_path, shape=Shape(slots=2), **WITHOUT_DETECTORS) as running:
        _run(running)
        assert bool(running.wrong) is not guarded


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "planted"])
def test_a_wait_that_ran_out_hands_back_no_answer(
    guarded: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    if not guarded:
        real = client_step.wait_for_answer

        def trusting(*arguments: object) -> WaitEnd:
            end = real(*arguments)  # type: ignore[arg-type]
            return WaitEnd.ANSWERED if end is WaitEnd.STALLED else end

        monkeypatch.setattr(client_step, "wait_for_answer", trusting)
    with pair(tmp_path, client={"detectors": "none"}) as running:
        _run(running, 2)
        with running.stalled():
            _run(running, 2)
        assert bool(running.wrong) is not guarded


def _late_write(tmp_path: Path, patch: Patch) -> tuple[list[str], list[Source]]:
    """A service that is held inside a step writes its answer while a successor's is read.

    Returns:
        what was wrong; where the layers of the first step after the successor's start came from.
    """
    engine = HeldEngine()
    none = {"detectors": "none"}
    successor = Settings(address=f"unix:{tmp_path / 'e' / 'i.sock'}", **none)
    with (
        service_running(successor, engine=engine) as second,
        pair(tmp_path, shape=Shape(slots=1), client={"banks": 1, **none}, **none) as running,
    ):
        _run(running, 2)
        running.engine.hold()
        running.session.settings.address = second.address
        with running.impatient():
            running.step()
        running.step()
        session = running.session
        assert eventually(
            lambda: session.statistics.attachments > 1 or "banks: " in str(session.last_error)
        )
        hand_back = Step.hand_back

        def read_late(*arguments: object) -> Source:
            running.engine.release()
            assert eventually(lambda: running.engine.ended > 0)
            return hand_back(*arguments)  # type: ignore[arg-type]

        patch.setattr(Step, "hand_back", read_late)
        sources = running.step()
        patch.undo()
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        return running.wrong, sources


def test_a_bank_is_retired_until_its_old_service_has_drained(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    wrong, sources = _late_write(tmp_path, monkeypatch)
    assert not wrong
    assert set(sources) == {Source.INLINE}


def test_without_retirement_the_check_turns_red(tmp_path: Path, monkeypatch: Patch) -> None:
    """The old service may also take the successor's plan from their ring: then all is inline."""
    with pytest.MonkeyPatch.context() as plant:
        plant.setattr(BankPool, "retire", lambda pool, bank, *_: pool.give_back(bank))
        # The old service rings its end in the same memory, which its successor also uses.
        plant.setattr(ServiceBells, "drained", lambda bells: None)
        for attempt in range(10):
            (folder := tmp_path / str(attempt)).mkdir()
            wrong, sources = _late_write(folder, monkeypatch)
            if Source.SERVICE in sources:
                break
    assert wrong


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "planted"])
def test_a_newer_step_ends_the_wait_for_an_older_one(
    guarded: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The worker leaves a step after its first layer; the next one must not wait for the gate."""
    if not guarded:

        def check_wanted(executor: StepExecutor, plan: object) -> None:
            if executor._is_closing() or executor._bells.is_detached():
                raise StepCancelled("not wanted")

        monkeypatch.setattr(StepExecutor, "_check_wanted", check_wanted)
    bounds = (SOON, SOON) if guarded else (6.0, 0.5)
    client = {"wait_bound_seconds": bounds[1]}
    with pair(tmp_path, gate_bound_seconds=bounds[0], client=client) as running:
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            running.ask(step, case, case.layers[0])
        sources = running.step()
        running.checker.assert_right()
        assert (set(sources) == {Source.SERVICE}) is guarded
        assert (running.session.statistics.detachments == 0) is guarded


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "planted"])
def test_a_session_is_closed_only_when_nothing_writes_its_bank(
    guarded: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Drained before unmapped: after CloseSession has answered, the bank's bytes stay."""
    if not guarded:
        monkeypatch.setattr(SessionSteps, "_end_runner", lambda steps, finish: 0)
    with pair(tmp_path, shape=Shape(slots=1)) as running:
        _run(running, 2)
        attachment = running.session._attachment
        assert attachment is not None
        running.engine.hold()
        case = running.case()
        closed = threading.Event()

        def close() -> None:
            attachment.control_plane.close_session(
                pb.CloseSessionRequest(session_id=attachment.session_id, epoch=attachment.epoch)
            )
            closed.set()

        with running.session.step(case.inputs, case.layers) as step:
            query = case.queries[case.layers[0]]
            step.stage(case.layers[0], query.q, query.weights)
            assert running.engine.waiting.wait(SOON)
            caller = threading.Thread(target=close)
            caller.start()
            early = closed.wait(0.5 if guarded else SOON)
            before = attachment.bank.answers[0].clone()
            running.engine.release()
            caller.join(SOON)
            # By the engine, once it was released.
            assert eventually(lambda: not torch.equal(before, attachment.bank.answers[0]))
        assert early is not guarded
        if guarded:
            assert attachment.bells.is_drained()
    # What it says of its end belongs to no later test.
    runner = f"steps-{attachment.epoch}"
    assert eventually(lambda: runner not in {thread.name for thread in threading.enumerate()})


def test_an_answer_that_comes_after_detachment_never_reaches_the_caller(
    tmp_path: Path,
) -> None:
    with pair(tmp_path, shape=Shape(slots=1)) as running:
        _run(running, 2)
        running.engine.hold()
        case = running.case()
        with running.impatient(), running.session.step(case.inputs, case.layers) as step:
            answers = running.checker.run(step, case)
        old = running.session._attachment
        assert old is not None
        assert old.detached_because
        before = old.bank.answers[0].clone()
        running.engine.release()
        assert eventually(old.bank.control.bells.is_drained)
        assert not torch.equal(before, old.bank.answers[0])  # it did come
        for layer, answer in zip(case.layers, answers, strict=True):
            assert torch.equal(answer, case.expected[layer])
        running.checker.assert_right()
