"""What a session makes of the service's terms: checked here too, shown, and refused by name."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import AttachRefused, Session, Source
from indexer_client.control_plane import ControlPlane
from tests.service.support import running as service_running
from tests.support.plants import patient_client, patient_service
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape

Change = Callable[[pb.OpenSessionResponse], None]


def _layout(**fields: int) -> Change:
    def change(opened: pb.OpenSessionResponse) -> None:
        opened.layout.MergeFrom(pb.HandoffLayout(**fields))

    return change


def _hash(opened: pb.OpenSessionResponse) -> None:
    opened.configuration.hash = "0" * 64


def _placement(opened: pb.OpenSessionResponse) -> None:
    opened.placement = pb.PLACEMENT_MPS


def _signalling(opened: pb.OpenSessionResponse) -> None:
    opened.signalling = pb.SIGNALLING_STREAM


def _no_layout(opened: pb.OpenSessionResponse) -> None:
    opened.ClearField("layout")


TERMS: dict[str, tuple[str, Change]] = {
    "another version": ("layout.version", _layout(version=99)),
    "a service that does not say": ("layout.version", _no_layout),
    "another fingerprint": ("layout.fingerprint", _layout(fingerprint=7)),
    "other slots": ("layout.slots", _layout(slots=77)),
    "another configuration": ("configuration.hash", _hash),
    "another placement": ("placement", _placement),
    "another signalling": ("signalling", _signalling),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_that_were_not_asked_for_are_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, change = TERMS[name]
    open_session = ControlPlane.open_session

    def changed(plane: ControlPlane, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        opened = open_session(plane, request)
        change(opened)
        return opened

    monkeypatch.setattr(ControlPlane, "open_session", changed)
    steps, checker = RandomSteps(Shape(), 1), Checker()
    settings = patient_client(f"unix:{tmp_path}/d/i.sock")
    with (
        service_running(patient_service(settings.address)) as service,
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session,
    ):
        assert eventually(lambda: session.last_error is not None, SOON)
        assert isinstance(session.last_error, AttachRefused)
        assert str(session.last_error).startswith(f"{field}: ")
        assert "(fix: " in str(session.last_error)
        case = steps.case(1)
        with session.step(case.inputs, case.layers) as step:
            checker.run(step, case)
        assert set(checker.last) == {Source.INLINE}
        assert session.reasons == ()
        monkeypatch.undo()
        session.wait_attached(SOON)
        # What was refused was closed, and every bank came back.
        assert len(service.status().sessions) == 1
    checker.assert_right()


def test_a_session_starts_and_closes_without_a_with_block_and_shows_the_reasons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "indexer_client")
    steps, checker = RandomSteps(Shape(), 1), Checker()
    settings = patient_client(f"unix:{tmp_path}/d/i.sock")
    with service_running(patient_service(settings.address)) as service:
        session = Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings)
        session.start()
        session.wait_attached(SOON)
        assert session.reasons
        (told,) = [line for line in caplog.messages if "attached: " in line]
        assert all(reason in told for reason in session.reasons)
        case = steps.case(1)
        with session.step(case.inputs, case.layers) as step:
            checker.run(step, case)
        assert set(checker.last) == {Source.SERVICE}
        session.close()
        assert session.reasons == ()
        assert not service.status().sessions
        session.close()
    checker.assert_right()


def test_a_session_that_was_never_started_closes(tmp_path: Path) -> None:
    steps = RandomSteps(Shape(), 1)
    settings = patient_client(f"unix:{tmp_path}/d/i.sock")
    Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings).close()
