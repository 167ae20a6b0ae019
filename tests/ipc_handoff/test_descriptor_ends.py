"""Descriptors over the Unix socket: how connections end, on either side, and no leak in any."""

import os
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from ipc_handoff import descriptors
from ipc_handoff.descriptors import DescriptorConnection, DescriptorServer, Peer, peer_of
from ipc_handoff.errors import DescriptorRefused
from tests.ipc_handoff.descriptor_peers import (
    DESCRIPTOR,
    NONCE,
    Raw,
    Service,
    packet,
)
from tests.ipc_handoff.support import peer
from tests.support.descriptors import copies_of, no_descriptor_leaks
from tests.support.waiting import SOON, eventually

# Ends.


def test_silent_connections_are_dropped_and_greeted_ones_stay(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.expect()
    with closing(service.connect()) as connection:
        monkeypatch.setattr(descriptors, "_HELLO_SECONDS", 0.3)
        silent = Raw(service.path)
        with closing(silent.sock):
            assert silent.is_dropped()
        time.sleep(0.3)
        connection.send(16, 0)
        assert service.gone == []
    service.server.forget(NONCE)


def test_a_connection_that_only_talks_nonsense_is_dropped_too(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_HELLO_SECONDS", 0.2)
    raw = Raw(service.path)
    with closing(raw.sock):
        end = time.monotonic() + SOON
        with pytest.raises((OSError, AssertionError)):
            while time.monotonic() < end:
                raw.say(b"nonsense")
                time.sleep(0.02)
        assert time.monotonic() < end


def test_one_connection_too_many_is_closed_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "MAX_CONNECTIONS", 3)
    service.expect()
    held = [service.raw() for _ in range(3)]
    assert eventually(lambda: service.connections() == 3)
    with pytest.raises(DescriptorRefused):
        service.connect()
    held.pop().sock.close()
    assert eventually(lambda: service.connections() == 2)
    service.connect().close()
    for raw in held:
        raw.sock.close()
    assert eventually(lambda: service.connections() == 0)


@pytest.mark.parametrize("end", ["close", "kill", "shutdown"])
def test_an_end_is_told_exactly_once(end: str, service: Service) -> None:
    service.expect()
    if end == "kill":
        with peer("send_descriptors", service.path, NONCE.hex(), "16") as child:
            child.hear()
    else:
        raw = service.raw()
        assert raw.hello() == ""
        if end == "shutdown":
            raw.sock.shutdown(socket.SHUT_RDWR)
        raw.sock.close()
    assert eventually(lambda: service.gone == ["worker"])
    assert service.is_alive()
    time.sleep(0.05)
    assert service.gone == ["worker"]
    service.server.forget(NONCE)
    assert service.gone == ["worker"]


def test_an_end_that_is_told_to_a_faulty_listener_does_not_end_the_server(
    service: Service,
) -> None:
    def faulty() -> None:
        raise RuntimeError("planted")

    service.server.expect(NONCE, faulty)
    service.connect().close()
    assert eventually(lambda: service.connections() == 0)
    assert service.is_alive()


def test_a_peer_that_never_reads_its_replies_is_dropped_and_never_blocks_the_server(
    service: Service,
) -> None:
    service.expect()
    raw = service.raw()
    with closing(raw.sock):
        raw.hello()
        with pytest.raises(OSError):
            for _ in range(100_000):
                raw.sock.send(b"nonsense")
        assert service.is_alive()
        assert eventually(lambda: service.gone == ["worker"])


def test_forget_closes_what_was_not_taken_and_the_connection(
    service: Service, pipe: tuple[int, int]
) -> None:
    inbox = service.expect()
    with closing(service.connect()) as connection:
        (end,), own = service.server._connections, copies_of(pipe[0])
        for token in range(5):
            connection.send(token, pipe[0])
        assert copies_of(pipe[0]) == own + 5
        service.server.forget(NONCE)
        assert copies_of(pipe[0]) == own
        # The service's end of the connection goes too: who keeps old ones must not use them up.
        assert eventually(lambda: service.connections() == 0)
        assert end.sock.fileno() == -1
        assert inbox.take(0) is None
        with pytest.raises(DescriptorRefused):
            connection.send(6, pipe[0])
        with pytest.raises(DescriptorRefused, match="no open session"):
            service.connect()
        service.server.forget(NONCE)


def test_a_forgotten_descriptor_is_the_last_hold_on_its_file(
    service: Service, pipe: tuple[int, int]
) -> None:
    service.expect()
    reader, writer = os.pipe()
    with closing(service.connect()) as connection:
        connection.send(16, writer)
        os.close(writer)
        service.server.forget(NONCE)
        assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_closed_server_leaves_nothing_open(tmp_path: Path, pipe: tuple[int, int]) -> None:
    with no_descriptor_leaks():
        service = Service(tmp_path)
        service.expect()
        connection = service.connect()
        connection.send(16, pipe[0])
        silent = service.raw()
        service.server.close()
        assert silent.is_dropped()
        with pytest.raises(DescriptorRefused):
            connection.send(17, pipe[0])
        connection.close()
        silent.sock.close()
    with pytest.raises(DescriptorRefused, match="descriptor socket"):
        service.connect()


# The worker's end.


def test_nobody_listens(tmp_path: Path) -> None:
    with no_descriptor_leaks(), pytest.raises(DescriptorRefused, match="No such file"):
        DescriptorConnection(str(tmp_path / "nothing"), NONCE)


class Mute:
    """A server that answers only when told to."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "mute")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        self.accepted: socket.socket
        self.thread = threading.Thread(target=self._greet)
        self.thread.start()

    def _greet(self) -> None:
        self.accepted, _ = self.listener.accept()
        self.accepted.recv(100)
        self.accepted.send(b"\0\0")

    def close(self) -> None:
        self.accepted.close()
        self.listener.close()


def test_a_service_that_does_not_answer_is_given_up(
    tmp_path: Path,
) -> None:
    with (
        no_descriptor_leaks(),
        closing(Mute(tmp_path)) as mute,
        closing(DescriptorConnection(mute.path, NONCE)) as connection,
    ):
        mute.thread.join()
        assert connection._sock.gettimeout() == descriptors._REPLY_SECONDS
        connection._sock.settimeout(0.2)
        with pytest.raises(DescriptorRefused, match="descriptor 16: timed out"):
            connection.send(16, 0)


def test_a_late_answer_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    """16 is accepted too late, 17 refused: 17 must not count as accepted."""
    with (
        closing(Mute(tmp_path)) as mute,
        closing(DescriptorConnection(mute.path, NONCE)) as connection,
    ):
        mute.thread.join()
        connection._sock.settimeout(0.2)
        with pytest.raises(DescriptorRefused):
            connection.send(16, 0)
        with suppress(BrokenPipeError):
            mute.accepted.send(b"\0\0")
        with pytest.raises(DescriptorRefused):
            connection.send(17, 0)


def test_a_peer_in_a_socket_pair_is_this_process() -> None:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        assert peer_of(one) == Peer(os.getpid(), os.geteuid())


def test_planted_server_that_keeps_refused_descriptors_is_seen(
    service: Service, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leak check of this file notices one descriptor."""
    leaked: list[int] = []

    def handle(self: DescriptorServer, connection: Any, data: bytes, fds: list[int]) -> str:
        leaked.extend(fds)
        return "refused"

    monkeypatch.setattr(DescriptorServer, "_handle", handle)
    raw = service.raw()
    with (
        closing(raw.sock),
        pytest.raises(AssertionError, match="descriptors left open"),
        no_descriptor_leaks(seconds=0.1),
    ):
        raw.say(packet(DESCRIPTOR), [pipe[0]])
    for fd in leaked:
        os.close(fd)
