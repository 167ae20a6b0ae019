"""The service upgraded under a running client, and versions that do not agree."""

import signal
from pathlib import Path

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, Source
from indexer_client.control_plane import ControlPlane
from tests.e2e import versions
from tests.e2e.conftest import Start
from tests.service.support import open_request
from tests.support.processes import ServiceProcess, left_in, nothing_mapped
from tests.support.runs import Run, running
from tests.support.waiting import SOON, eventually


def _upgrade(run: Run, old: ServiceProcess) -> list[Source]:
    """End a service as its supervisor does, with steps running; where their layers came from."""
    old.signal(signal.SIGTERM)
    seen: list[Source] = []
    while old.is_alive:
        seen += run.step()
    assert old.wait() == 0
    for _ in range(3):
        seen += run.step()
    return seen


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_a_client_goes_on_with_a_newer_service(
    signalling: str, start: Start, client_settings: ClientSettings, socket: Path
) -> None:
    """No step is lost or wrong, none waits for the upgrade, and the newer one is used."""
    settings = client_settings.model_copy(update={"signalling": signalling})
    old = start()
    with running(settings, 7) as run:
        run.attached_steps()
        between = _upgrade(run, old)
        assert between[-1] is Source.INLINE
        newer = start(prepare=versions.compatible)
        assert newer.status().version == versions.NEWER_VERSION
        run.attached_steps()
        # And back: a release is taken back the same way.
        assert _upgrade(run, newer)[-1] is Source.INLINE
        again = start()
        run.attached_steps()
        assert again.status().version != versions.NEWER_VERSION
        statistics = run.session.statistics
        assert statistics.attachments == 3
        assert statistics.rejected_steps == statistics.faulted_rows == 0
        assert run.slowest < settings.wait_bound_seconds / 2
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(again))
    assert again.stop() == 0
    assert left_in(socket.parent) == []


def test_a_service_of_another_layout_is_not_used_and_the_reason_named(
    start: Start, client_settings: ClientSettings
) -> None:
    old = start()
    with running(client_settings, 8) as run:
        run.attached_steps()
        _upgrade(run, old)
        other = start(prepare=versions.other_layout)

        def is_refused() -> bool:
            return "layout.version" in str(run.session.last_error)

        run.until(is_refused)
        for _ in range(5):
            assert set(run.step()) == {Source.INLINE}
        assert "the same dsa-indexer version" in str(run.session.last_error)
        assert other.stop() == 0
        start()
        run.attached_steps()
    run.checker.assert_right()


def test_a_newer_clients_fields_are_left_alone(
    start: Start, client_settings: ClientSettings
) -> None:
    start()
    control_plane = ControlPlane(client_settings.model_copy(update={"rpc_timeout_seconds": SOON}))
    request = open_request(instance="newer")
    request.MergeFromString(versions.UNKNOWN_FIELD)
    opened = control_plane.open_session(request)
    ended = pb.CloseSessionRequest(session_id=opened.session_id, epoch=opened.epoch)
    ended.MergeFromString(versions.UNKNOWN_FIELD)
    control_plane.close_session(ended)
    control_plane.close()
