"""A service that takes its time to register an attachment's memory: it makes kernels."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from indexer_client import ClientSettings, IndexerError, ServiceUnavailable, Session, Source
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import SESSION_LOST
from indexer_client.registering import Registering
from indexer_service import server
from indexer_service.sessions import Session as ServiceSession
from indexer_service.settings import Settings
from tests.service.support import running as service_running
from tests.support.plants import SOON
from tests.support.processes import Process
from tests.support.waiting import eventually
from tests.support.workloads import Checker, RandomSteps, Shape

LONG = 60.0
_register = ServiceSession.register


@pytest.fixture
def steps() -> Iterator[RandomSteps]:
    made = RandomSteps(Shape(), 1)
    yield made
    made.close()


def _slow(seconds: float, begun: Callable[[], None] = lambda: None) -> Any:
    async def register(session: ServiceSession, regions: Any) -> None:
        await _register(session, regions)
        begun()
        await asyncio.sleep(seconds)

    return patch.object(ServiceSession, "register", register)


@contextmanager
def _attaching(folder: Path, steps: RandomSteps, **settings: Any) -> Iterator[Session]:
    asked = {"reattach_seconds": 0.1, "rpc_timeout_seconds": 0.3, **settings}
    made = ClientSettings(address=f"unix:{folder}/d/i.sock", **asked)
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=made) as session:
        yield session


def _step(session: Session, steps: RandomSteps, checker: Checker, number: int) -> set[Source]:
    case = steps.case(number)
    with session.step(case.inputs, case.layers) as step:
        checker.run(step, case)
    return set(checker.last)


def test_it_may_take_longer_than_a_call_and_a_lease(tmp_path: Path, steps: RandomSteps) -> None:
    """Meanwhile steps are inline, and nothing is asked for a second time."""
    begun: list[float] = []
    checker = Checker()
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock", lease_seconds=0.5)
    with (
        _slow(1.5, lambda: begun.append(time.monotonic())),
        service_running(settings),
        _attaching(tmp_path, steps) as session,
    ):
        assert eventually(lambda: bool(begun))
        assert _step(session, steps, checker, 1) == {Source.INLINE}
        session.wait_attached(SOON)
        assert _step(session, steps, checker, 2) == {Source.SERVICE}
        assert len(begun) == session.statistics.attachments == 1
    checker.assert_right()


def test_it_has_a_deadline_of_its_own(tmp_path: Path, steps: RandomSteps) -> None:
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock")
    with (
        _slow(2.0),
        service_running(settings),
        _attaching(tmp_path, steps, rpc_timeout_seconds=LONG, register_timeout_seconds=0.3) as made,
    ):
        assert eventually(lambda: "Deadline" in str(made.last_error))


def test_closing_does_not_wait_for_it(tmp_path: Path, steps: RandomSteps) -> None:
    begun: list[float] = []
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock")
    with _slow(3.0, lambda: begun.append(time.monotonic())), service_running(settings):
        with _attaching(tmp_path, steps, rpc_timeout_seconds=LONG) as session:
            assert eventually(lambda: bool(begun))
            closing = time.monotonic()
        assert time.monotonic() - closing < 1.0
        assert "closed while" in str(session.last_error)


def test_a_service_that_is_silent_meanwhile_is_not_waited_for(
    tmp_path: Path, steps: RandomSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen: the way to its successor is free after the deadline of other calls."""

    def silence(*_: object) -> None:
        raise ServiceUnavailable("Deadline Exceeded")

    monkeypatch.setattr(ControlPlane, "keep_alive", silence)
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock")
    with (
        _slow(3.0),
        service_running(settings),
        _attaching(tmp_path, steps) as session,
    ):
        assert eventually(lambda: "silent while" in str(session.last_error), 2.0)


def _serve_slowly(address: str, begun: str) -> None:
    with _slow(LONG, Path(begun).touch):
        server.run(Settings(address=address))


def test_the_services_death_ends_it_at_once(tmp_path: Path, steps: RandomSteps) -> None:
    begun = tmp_path / "begun"
    service = Process(_serve_slowly, f"unix:{tmp_path}/d/i.sock", str(begun))
    try:
        with _attaching(tmp_path, steps, rpc_timeout_seconds=LONG) as session:
            assert eventually(begun.exists, LONG)
            told = session.last_error
            service.kill()
            assert eventually(lambda: session.last_error not in (None, told), 1.0)
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
