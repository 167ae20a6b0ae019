"""Sessions whose service is not there, comes, or cannot be had."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from indexer_client import ClientSettings, IndexerError, ServiceUnavailable, Session, Source
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import REFUSALS
from indexer_service.settings import Settings
from ipc_handoff.banks import Bank, BankPool
from tests.service.support import running as service_running
from tests.support.plants import pair, patient_client, patient_service
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape


@pytest.fixture
def steps() -> Iterator[RandomSteps]:
    made = RandomSteps(Shape(), 1)
    yield made
    made.close()


def _settings(folder: Path) -> ClientSettings:
    return patient_client(f"unix:{folder}/d/i.sock")


def _step(session: Session, steps: RandomSteps, checker: Checker, number: int) -> set[Source]:
    case = steps.case(number)
    with session.step(case.inputs, case.layers) as step:
        checker.run(step, case)
    return set(checker.last)


def test_without_a_service_it_works_inline_and_attaches_when_one_comes(
    tmp_path: Path, steps: RandomSteps
) -> None:
    checker = Checker()
    settings = _settings(tmp_path)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        assert _step(session, steps, checker, 1) == {Source.INLINE}
        assert eventually(lambda: isinstance(session.last_error, ServiceUnavailable))
        with pytest.raises(ServiceUnavailable):
            session.wait_attached(0.05)
        assert session.epoch is None
        with service_running(patient_service(settings.address)):
            session.wait_attached(SOON)
            assert session.last_error is None
            assert _step(session, steps, checker, 2) == {Source.SERVICE}
            assert session.epoch
        # Stopped in good order; the session works on.
        assert _step(session, steps, checker, 3) == {Source.INLINE}
    checker.assert_right()
    assert session.statistics.steps == 3


def test_a_session_that_never_ran_a_step_ends(tmp_path: Path, steps: RandomSteps) -> None:
    settings = _settings(tmp_path)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings):
        pass
    with (
        service_running(patient_service(settings.address)) as service,
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session,
    ):
        session.wait_attached(SOON)
        assert len(service.status().sessions) == 1
    assert session.statistics.steps == 0


def test_an_error_inside_a_step_passes_and_the_next_step_is_right(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        case = running.case()
        with (
            pytest.raises(RuntimeError, match="of the engine"),
            running.session.step(case.inputs, case.layers) as step,
        ):
            running.ask(step, case, case.layers[0])
            raise RuntimeError("of the engine")
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_after_a_fork_the_child_is_refused_with_a_reason(
    tmp_path: Path, steps: RandomSteps
) -> None:
    settings = _settings(tmp_path)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        case = steps.case(1)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                session.step(case.inputs)
                text = "a step"
            except RuntimeError as error:
                text = str(error)
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            said = answer.read()
        os.waitpid(child, 0)
        assert said.startswith("session: made before a fork (fix: ")
        checker = Checker()
        assert _step(session, steps, checker, 1) == {Source.INLINE}
        checker.assert_right()


def _lose_registrations(
    patch: pytest.MonkeyPatch,
    count: int,
    error: type[IndexerError] = ServiceUnavailable,
    then: Callable[[], None] = lambda: None,
) -> None:
    """The first so many calls get no answer: whether they were carried out is unknown."""
    register = ControlPlane.register_regions
    lost = []

    def call(control_plane: ControlPlane, request: Any, look: Callable[[], None]) -> object:
        if len(lost) < count:
            lost.append(request)
            then()
            raise error("Deadline Exceeded")
        return register(control_plane, request, look)

    patch.setattr(ControlPlane, "register_regions", call)


def test_registrations_without_an_answer_use_up_no_bank(
    tmp_path: Path, steps: RandomSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service that was asked may never know of the bank, and so never drain it."""
    _lose_registrations(monkeypatch, 5)
    settings, checker = _settings(tmp_path), Checker()
    with (
        service_running(patient_service(settings.address)),
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session,
    ):
        session.wait_attached(SOON)
        assert _step(session, steps, checker, 1) == {Source.SERVICE}
    checker.assert_right()


@pytest.mark.parametrize(
    ("error", "comes_back"),
    [(kind, True) for kind in REFUSALS] + [(ServiceUnavailable, False), (IndexerError, False)],
)
def test_a_bank_is_used_again_only_when_the_service_has_refused_it(
    error: type[IndexerError],
    comes_back: bool,
    tmp_path: Path,
    steps: RandomSteps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """INTERNAL and UNKNOWN do not prove that nothing was mapped."""
    taken: list[Bank] = []
    take = BankPool.take

    def note(pool: BankPool) -> Bank | None:
        if (bank := take(pool)) is not None:
            taken.append(bank)
        return bank

    monkeypatch.setattr(BankPool, "take", note)
    lost_at: list[int] = []
    _lose_registrations(monkeypatch, 1, error, then=lambda: lost_at.append(len(taken)))
    settings = _settings(tmp_path).model_copy(update={"banks": 1})
    with (
        service_running(patient_service(settings.address)),
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session,
    ):
        session.wait_attached(SOON)
    (next_one,) = lost_at
    assert (taken[next_one - 1] is taken[next_one]) is comes_back


def test_a_lease_that_could_not_be_renewed_is_tried_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def fail(*_: object) -> None:
        tries.append(_)
        raise ServiceUnavailable("Deadline Exceeded")

    monkeypatch.setattr(ControlPlane, "keep_alive", fail)
    # Four tries at thirds of the lease would take 300 s.
    with pair(tmp_path, lease_seconds=300.0) as running:
        assert eventually(lambda: len(tries) > 3)
        monkeypatch.undo()
        assert set(running.step()) == {Source.SERVICE}


def test_what_is_held_is_looked_at_under_the_lock(tmp_path: Path, steps: RandomSteps) -> None:
    """The step thread may exchange it at any moment."""
    session = Session(steps.geometry, steps.k_caches, steps.fallback, settings=_settings(tmp_path))
    caretaker, looked = session._caretaker, Event()
    thread = Thread(target=lambda: (caretaker._held(), looked.set()))
    with caretaker._condition:
        thread.start()
        assert not looked.wait(0.2)
    thread.join()
    assert looked.is_set()


def test_an_attempt_that_breaks_is_told_and_repeated(
    tmp_path: Path, steps: RandomSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error of the system ends the thread that attaches."""
    failures, seen = [OSError("no descriptors left"), RuntimeError("odd")], Event()
    keep = ControlPlane.open_session

    def fail(control_plane: ControlPlane, request: object) -> object:
        if failures:
            assert len(failures) == 2 or seen.wait(SOON)
            raise failures.pop()
        return keep(control_plane, request)  # type: ignore[arg-type]

    monkeypatch.setattr(ControlPlane, "open_session", fail)
    settings, checker = _settings(tmp_path), Checker()
    with (
        service_running(patient_service(settings.address)),
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session,
    ):
        assert eventually(lambda: "odd" in str(session.last_error))
        seen.set()
        session.wait_attached(SOON)
        assert _step(session, steps, checker, 1) == {Source.SERVICE}
    checker.assert_right()


def test_tcp_carries_no_host_memory_and_says_so(steps: RandomSteps) -> None:
    checker = Checker()
    with service_running(Settings(address="127.0.0.1:0")) as service:
        settings = ClientSettings(address=service.address, reattach_seconds=0.2)
        with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
            assert eventually(lambda: "Unix socket" in str(session.last_error))
            with pytest.raises(IndexerError):
                session.wait_attached(0.05)
            assert _step(session, steps, checker, 1) == {Source.INLINE}
    checker.assert_right()


def test_half_a_tls_configuration_is_refused_before_any_step(steps: RandomSteps) -> None:
    settings = ClientSettings(address="127.0.0.1:1", client_tls_key=Path("/k.pem"))
    with pytest.raises(ValueError, match=r"^client_tls_certificate: .*\(fix: "):
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings)


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_select_once_asks_by_call(signalling: str, tmp_path: Path) -> None:
    with pair(tmp_path, client={"signalling": signalling}) as running:
        for _ in range(3):
            case = running.case()
            for layer, query in case.queries.items():
                out = torch.full_like(case.expected[layer], -2)
                running.session.select_once(layer, query.q, query.weights, case.inputs, out=out)
                assert torch.equal(out, case.expected[layer])
            assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_select_once_without_a_service_says_so(tmp_path: Path, steps: RandomSteps) -> None:
    case = steps.case(1)
    query, out = case.queries[2], torch.empty_like(case.expected[2])
    with (
        Session(
            steps.geometry, steps.k_caches, steps.fallback, settings=_settings(tmp_path)
        ) as session,
        pytest.raises(IndexerError),
    ):
        session.select_once(2, query.q, query.weights, case.inputs, out=out)


def test_closing_takes_no_longer_than_a_call_may(tmp_path: Path) -> None:
    """Also when the service is held in a step and does not answer."""
    with pair(tmp_path, client={"rpc_timeout_seconds": 0.5}) as running, running.stalled():
        assert set(running.step()) == {Source.INLINE}
        running.session.__exit__(None, None, None)
        assert running.engine.ended == 0
        # Closing again, as the pair does, is nothing.
