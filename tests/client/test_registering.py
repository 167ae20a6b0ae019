"""A service that takes its time to register an attachment's memory: it makes kernels."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import IndexerError, ServiceUnavailable, Session, Source
from indexer_client import registering as registering_module
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import SESSION_LOST
from indexer_client.registering import Registering
from indexer_service import serving
from indexer_service.sessions import Session as ServiceSession
from indexer_service.settings import Settings
from tests.service.support import running as service_running
from tests.support.plants import patient_client, patient_service
from tests.support.processes import Process
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape

LONG = 2 * SOON
CALL = 0.3
_LOOK_SECONDS = 0.01
_register = ServiceSession.register


@pytest.fixture
def steps() -> Iterator[RandomSteps]:
    made = RandomSteps(Shape(), 1)
    yield made
    made.close()


def _held(done: Callable[[], bool], begun: Callable[[], None] = lambda: None) -> Any:
    """Registrations last until something is so."""

    async def register(session: ServiceSession, regions: Any) -> None:
        await _register(session, regions)
        begun()
        while not done():
            await asyncio.sleep(_LOOK_SECONDS)

    return patch.object(ServiceSession, "register", register)


def _service(folder: Path) -> Settings:
    return patient_service(f"unix:{folder}/d/i.sock")


@contextmanager
def _attaching(folder: Path, steps: RandomSteps, **settings: Any) -> Iterator[Session]:
    asked = {"reattach_seconds": 0.1, "rpc_timeout_seconds": CALL, **settings}
    made = patient_client(f"unix:{folder}/d/i.sock", **asked)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=made) as session:
        yield session


def _step(session: Session, steps: RandomSteps, checker: Checker, number: int) -> set[Source]:
    case = steps.case(number)
    with session.step(case.inputs, case.layers) as step:
        checker.run(step, case)
    return set(checker.last)


def test_it_may_take_longer_than_a_call_while_the_lease_is_renewed(
    tmp_path: Path, steps: RandomSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile steps are inline, and nothing is asked for a second time."""
    begun: list[float] = []
    renewals: list[float] = []
    ended = Event()

    def renew(control_plane: ControlPlane, request: pb.KeepAliveRequest) -> None:
        renewals.append(time.monotonic())
        control_plane._stub.KeepAlive(request)  # with no deadline that a standstill could reach

    monkeypatch.setattr(ControlPlane, "keep_alive", renew)
    checker = Checker()
    with (
        _held(ended.is_set, lambda: begun.append(time.monotonic())),
        service_running(_service(tmp_path)),
        _attaching(tmp_path, steps) as session,
    ):
        assert eventually(lambda: bool(begun))
        assert _step(session, steps, checker, 1) == {Source.INLINE}
        assert eventually(lambda: len(renewals) > 5 and renewals[-1] > begun[0] + 2 * CALL)
        ended.set()
        session.wait_attached(SOON)
        assert _step(session, steps, checker, 2) == {Source.SERVICE}
        assert len(begun) == session.statistics.attachments == 1
    checker.assert_right()


def test_it_has_a_deadline_of_its_own(tmp_path: Path, steps: RandomSteps) -> None:
    ended = Event()
    with (
        _held(ended.is_set),
        service_running(_service(tmp_path)),
        _attaching(tmp_path, steps, rpc_timeout_seconds=LONG, register_timeout_seconds=0.3) as made,
    ):
        assert eventually(lambda: "Deadline" in str(made.last_error))
        ended.set()


def test_closing_does_not_wait_for_it(tmp_path: Path, steps: RandomSteps) -> None:
    begun, ended = Event(), Event()
    with _held(ended.is_set, begun.set), service_running(_service(tmp_path)):
        bounds = {"rpc_timeout_seconds": LONG, "register_timeout_seconds": SOON}
        with _attaching(tmp_path, steps, **bounds) as session:
            assert begun.wait(SOON)
        ended.set()
        assert "closed while" in str(session.last_error)


def test_a_service_that_is_silent_meanwhile_is_not_waited_for(
    tmp_path: Path, steps: RandomSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen: the way to its successor is free after the deadline of other calls."""

    def silence(*_: object) -> None:
        raise ServiceUnavailable("Deadline Exceeded")

    monkeypatch.setattr(ControlPlane, "keep_alive", silence)
    ended = Event()
    with (
        _held(ended.is_set),
        service_running(_service(tmp_path)),
        _attaching(tmp_path, steps) as session,
    ):
        assert eventually(lambda: "silent while" in str(session.last_error))
        ended.set()


def _serve_slowly(address: str, begun: str) -> None:
    with _held(lambda: False, Path(begun).touch):
        serving.run(Settings(address=address))


def test_the_services_death_ends_it_at_once(tmp_path: Path, steps: RandomSteps) -> None:
    begun = tmp_path / "begun"
    service = Process(_serve_slowly, f"unix:{tmp_path}/d/i.sock", str(begun))
    try:
        with _attaching(tmp_path, steps, rpc_timeout_seconds=LONG) as session:
            assert eventually(begun.exists)
            told = session.last_error
            service.kill()
            assert eventually(lambda: session.last_error not in (None, told))
            assert isinstance(session.last_error, ServiceUnavailable)
    finally:
        service.kill()


@pytest.mark.parametrize("error", SESSION_LOST)
def test_a_lost_session_is_no_refusal_of_its_memory(error: type[IndexerError]) -> None:
    """The service may have mapped the bank: what takes it for refused would use it again."""

    def lost() -> None:
        raise error("gone")

    registering = Registering(lost, lease_seconds=0.0, silent_seconds=LONG, is_wanted=lambda: True)
    with pytest.raises(ServiceUnavailable, match="gone"):
        registering.look()


def test_the_lease_is_renewed_every_third_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    renewed: list[float] = []
    monkeypatch.setattr(registering_module, "time", SimpleNamespace(monotonic=lambda: now))
    registering = Registering(
        lambda: renewed.append(now), lease_seconds=9.0, silent_seconds=LONG, is_wanted=lambda: True
    )
    for moment in (1.0, 2.9, 3.0, 3.1, 5.9, 6.1, 9.2):
        now = moment
        registering.look()
    assert renewed == [3.0, 6.1, 9.2]


def test_one_lost_answer_is_no_silence() -> None:
    answers = iter([None, ServiceUnavailable("late"), None, ServiceUnavailable("late")])

    def keep_alive() -> None:
        if (error := next(answers)) is not None:
            raise error

    registering = Registering(
        keep_alive, lease_seconds=0.0, silent_seconds=LONG, is_wanted=lambda: True
    )
    for _ in range(4):
        registering.look()
    assert next(answers, "all were asked for") == "all were asked for"
