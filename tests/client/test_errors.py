"""gRPC errors as typed exceptions."""

import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_client import (
    AlreadyExists,
    ClientSettings,
    IndexerError,
    InvalidRequest,
    LeaseExpired,
    LimitExceeded,
    NotFound,
    ServiceUnavailable,
    WrongState,
)
from indexer_client import control_plane as control_plane_module
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import SESSION_LOST
from tests.support.plants import patient_client
from tests.support.waiting import SOON

MESSAGE = "field: wrong (fix: another)"
TYPES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: LeaseExpired,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceUnavailable,
    grpc.StatusCode.CANCELLED: ServiceUnavailable,
    grpc.StatusCode.INTERNAL: IndexerError,
    grpc.StatusCode.UNIMPLEMENTED: IndexerError,
}


class Refusing(rpc.IndexerServiceServicer):
    """Answers every GetStatus with the code that a test asks for."""

    code = grpc.StatusCode.UNKNOWN

    def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        context.abort(self.code, MESSAGE)


@pytest.fixture
def refusing() -> Iterator[tuple[Refusing, ControlPlane]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = Refusing()
    rpc.add_IndexerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    control_plane = ControlPlane(patient_client(f"127.0.0.1:{port}"))
    yield servicer, control_plane
    control_plane.close()
    server.stop(None)


@pytest.mark.parametrize("code", TYPES, ids=lambda code: code.name)
def test_each_code_has_its_type_and_keeps_the_message(
    code: grpc.StatusCode, refusing: tuple[Refusing, ControlPlane]
) -> None:
    servicer, control_plane = refusing
    servicer.code = code
    with pytest.raises(IndexerError) as caught:
        control_plane.get_status()
    assert type(caught.value) is TYPES[code]
    assert str(caught.value) == MESSAGE


def test_a_lost_session_is_told_from_a_silent_service() -> None:
    assert not issubclass(ServiceUnavailable, SESSION_LOST)
    assert all(issubclass(kind, SESSION_LOST) for kind in (WrongState, NotFound, LeaseExpired))


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    control_plane = ControlPlane(ClientSettings(address=f"unix:{tmp_path}/none.sock"))
    with pytest.raises(ServiceUnavailable):
        control_plane.get_status()
    control_plane.close()


def test_a_frozen_service_holds_up_no_call_that_moves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its successor is found soon, however long other calls may take."""
    monkeypatch.setattr(control_plane_module, "_QUICK_SECONDS", 0.2)
    path = tmp_path / "frozen.sock"
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(path))
        frozen.listen()
        settings = patient_client(f"unix:{path}", rpc_timeout_seconds=2 * SOON)
        control_plane = ControlPlane(settings)
        for call in (
            control_plane.get_status,
            lambda: control_plane.open_session(pb.OpenSessionRequest()),
            lambda: control_plane.keep_alive(pb.KeepAliveRequest()),
        ):
            # Not that the connection cannot be had, which gRPC finds after 20 s.
            with pytest.raises(ServiceUnavailable, match="Deadline"):
                call()
        control_plane.close()


def test_a_call_on_a_closed_channel_is_unavailable(tmp_path: Path) -> None:
    control_plane = ControlPlane(ClientSettings(address=f"unix:{tmp_path}/none.sock"))
    control_plane.close()
    with pytest.raises(ServiceUnavailable):
        control_plane.keep_alive(pb.KeepAliveRequest())


def test_a_message_that_is_too_long_is_refused_with_field_and_fix(
    refusing: tuple[Refusing, ControlPlane],
) -> None:
    _, control_plane = refusing
    with pytest.raises(LimitExceeded, match=r"^message: .* \(fix: .*max_message_bytes\)$"):
        control_plane.keep_alive(pb.KeepAliveRequest(session_id="x" * (5 << 20)))
