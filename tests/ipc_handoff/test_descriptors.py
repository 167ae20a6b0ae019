"""Descriptors over the Unix socket: the secret, the refusals, the ends, and no leak in any."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc_handoff import descriptors
from ipc_handoff.descriptors import DescriptorConnection, DescriptorServer, Inbox, Peer, peer_of
from ipc_handoff.errors import DescriptorRefused
from tests.ipc_handoff.support import eventually, no_descriptor_leaks, open_descriptors, peer

NONCE = bytes(range(16))
OTHER = bytes(range(100, 116))
HELLO, DESCRIPTOR = 1, 2


class Service:
    """A server, and what it was told of ends."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "descriptors")
        self.server = DescriptorServer(self.path)
        self.gone: list[str] = []

    def expect(self, nonce: bytes = NONCE, name: str = "worker") -> Inbox:
        return self.server.expect(nonce, lambda: self.gone.append(name))

    def connect(self, nonce: bytes = NONCE) -> DescriptorConnection:
        return DescriptorConnection(self.path, nonce)

    def raw(self) -> "Raw":
        """Accepted when it returns: else a test would count a descriptor still to come."""
        accepted = set(self.server._connections)
        raw = Raw(self.path)
        assert eventually(lambda: bool(self.server._connections - accepted))
        return raw

    def connections(self) -> int:
        return len(self.server._connections)

    def is_alive(self) -> bool:
        """It still serves a well-behaved worker."""
        nonce = os.urandom(16)
        self.server.expect(nonce, lambda: None)
        with closing(self.connect(nonce)):
            return self.server._thread.is_alive()


class Raw:
    """A connection that says what it likes."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(5)
        self.sock.connect(path)

    def say(self, packet: bytes, fds: list[int] | None = None) -> str:
        """The refusal; "" if accepted."""
        socket.send_fds(self.sock, [packet], fds or [])
        reply = self.sock.recv(1000)
        assert len(reply) >= 2, "the connection was dropped"
        assert (reply[:2] != b"\0\0") == (len(reply) > 2)
        return reply[2:].decode()

    def hello(self, nonce: bytes = NONCE) -> str:
        return self.say(packet(HELLO, nonce))

    def is_dropped(self) -> bool:
        try:
            return self.sock.recv(1000) == b""
        except ConnectionResetError:
            return True


def packet(
    kind: int, nonce: bytes = NONCE, token: int = 16, magic: bytes = b"DSAd", version: int = 1
) -> bytes:
    return struct.pack("<4sHH16sQ", magic, version, kind, nonce, token)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with no_descriptor_leaks():
        service = Service(tmp_path)
        yield service
        service.server.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


# The good case.


def test_a_descriptor_arrives_under_its_token_and_is_taken_once(
    service: Service, pipe: tuple[int, int]
) -> None:
    inbox = service.expect()
    with closing(service.connect()) as connection:
        connection.send(16, pipe[0])
        connection.send(2**64 - 1, pipe[1])
        for token, end in ((16, pipe[0]), (2**64 - 1, pipe[1])):
            got = inbox.take(token)
            assert got is not None
            assert got != end
            assert same_file(got, end)
            assert not os.get_inheritable(got)
            os.close(got)
            assert inbox.take(token) is None


def test_two_sessions_have_inboxes_of_their_own(service: Service, pipe: tuple[int, int]) -> None:
    one, two = service.expect(NONCE), service.expect(OTHER)
    with closing(service.connect(NONCE)) as first, closing(service.connect(OTHER)):
        first.send(16, pipe[0])
        assert two.take(16) is None
        got = one.take(16)
        assert got is not None
        os.close(got)


def test_each_side_knows_the_other_from_the_kernel(service: Service) -> None:
    inbox = service.expect()
    with peer("send_descriptors", service.path, NONCE.hex(), "16,17") as child:
        assert child.hear() == str(os.getpid())
        assert inbox.peer == Peer(child.pid, os.geteuid())
        for token in (16, 17):
            got = inbox.take(token)
            assert got is not None
            assert os.pread(got, 10, 0) == b"%d" % token
            os.close(got)
        assert service.gone == []
    assert eventually(lambda: service.gone == ["worker"])


# Who may speak.


def test_a_wrong_nonce_is_refused(service: Service) -> None:
    service.expect(NONCE)
    with pytest.raises(DescriptorRefused, match="no open session has this nonce"):
        service.connect(OTHER)
    assert service.is_alive()


def test_nothing_is_taken_before_the_nonce(service: Service, pipe: tuple[int, int]) -> None:
    inbox = service.expect()
    raw = service.raw()
    with closing(raw.sock):
        assert raw.say(packet(DESCRIPTOR), [pipe[0]]) == "expected the session's nonce first"
        assert inbox.take(16) is None
        assert raw.hello() == ""
        assert raw.say(packet(DESCRIPTOR), [pipe[0]]) == ""
    service.server.forget(NONCE)


def test_a_second_connection_on_one_nonce_is_refused_even_after_the_first_ended(
    service: Service,
) -> None:
    service.expect()
    with (
        closing(service.connect()),
        pytest.raises(DescriptorRefused, match="has a connection already"),
    ):
        service.connect()
    assert eventually(lambda: service.gone == ["worker"])
    with pytest.raises(DescriptorRefused, match="has a connection already"):
        service.connect()


def test_a_second_nonce_on_one_connection_is_refused(service: Service) -> None:
    """Else the first session would never hear of the connection's end."""
    service.expect(NONCE, "first")
    service.expect(OTHER, "second")
    raw = service.raw()
    with closing(raw.sock):
        assert raw.hello(NONCE) == ""
        assert raw.hello(OTHER) == "the connection has a session already"
        assert raw.hello(NONCE) == "the connection has a session already"
        with closing(service.connect(OTHER)):
            pass
    assert eventually(lambda: sorted(service.gone) == ["first", "second"])


@pytest.mark.parametrize(("uid", "refused"), [(0, False), (os.geteuid(), False), (4242, True)])
def test_another_user_is_refused(
    uid: int, refused: bool, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.expect()
    monkeypatch.setattr(descriptors, "peer_of", lambda sock: Peer(1, uid))
    raw = service.raw()
    with closing(raw.sock):
        assert raw.hello() == ("user 4242 is not the service's user" if refused else "")


# What may be said.

BAD_PACKETS: dict[str, tuple[bytes, str]] = {
    "one byte": (b"x", "a packet of 1 bytes, expected 32"),
    "a byte short": (packet(DESCRIPTOR)[:-1], "a packet of 31 bytes"),
    "a byte long": (packet(DESCRIPTOR) + b"x", "a packet of 33 bytes"),
    "very long": (packet(DESCRIPTOR) * 1000, "a packet of 33 bytes"),
    "garbage": (b"\xff" * 32, "descriptor protocol 65535, expected 1"),
    "another magic": (packet(DESCRIPTOR, magic=b"DSAx"), "descriptor protocol"),
    "another version": (packet(DESCRIPTOR, version=2), "descriptor protocol 2, expected 1"),
    "another kind": (packet(3), "expected the session's nonce first"),
    "kind 0": (packet(0), "expected the session's nonce first"),
}


@pytest.mark.parametrize("greeted", [False, True], ids=["before the nonce", "after it"])
@pytest.mark.parametrize("what", BAD_PACKETS)
def test_a_bad_packet_is_refused_and_its_descriptors_closed(
    what: str, greeted: bool, service: Service, pipe: tuple[int, int]
) -> None:
    data, reason = BAD_PACKETS[what]
    inbox = service.expect()
    raw = service.raw()
    with closing(raw.sock):
        assert not greeted or raw.hello() == ""
        with no_descriptor_leaks():
            for fds in ([], [pipe[0]], list(pipe)):
                assert reason in raw.say(data, fds)
        assert inbox.take(16) is None
    assert service.is_alive()


@pytest.mark.parametrize("count", [0, 2, 3, 4, 5, 50])
def test_a_packet_with_any_number_of_descriptors_but_one_is_refused(
    count: int, service: Service, pipe: tuple[int, int]
) -> None:
    inbox = service.expect()
    raw = service.raw()
    with closing(raw.sock):
        assert raw.hello() == ""
        with no_descriptor_leaks():
            refusal = raw.say(packet(DESCRIPTOR), [pipe[0]] * count)
            assert refusal == f"{min(count, 4)} descriptors in a packet, expected 1"
        assert inbox.take(16) is None
        assert raw.say(packet(DESCRIPTOR), [pipe[0]]) == ""
    service.server.forget(NONCE)


def test_descriptors_beside_a_nonce_are_closed(service: Service, pipe: tuple[int, int]) -> None:
    service.expect()
    raw = service.raw()
    with closing(raw.sock), no_descriptor_leaks():
        assert raw.say(packet(HELLO), list(pipe)) == ""


def test_an_empty_packet_ends_the_connection_and_its_descriptors_are_closed(
    service: Service, pipe: tuple[int, int]
) -> None:
    service.expect()
    raw = service.raw()
    with closing(raw.sock):
        assert raw.hello() == ""
        socket.send_fds(raw.sock, [b""], list(pipe))
        assert raw.is_dropped()
    assert eventually(lambda: service.gone == ["worker"])


def test_a_token_in_use_is_refused_and_free_again_once_taken(
    service: Service, pipe: tuple[int, int]
) -> None:
    inbox = service.expect()
    with closing(service.connect()) as connection:
        connection.send(16, pipe[0])
        with no_descriptor_leaks(), pytest.raises(DescriptorRefused, match="token 16 is in use"):
            connection.send(16, pipe[1])
        first = inbox.take(16)
        assert first is not None
        assert same_file(first, pipe[0])
        connection.send(16, pipe[1])
        second = inbox.take(16)
        assert second is not None
        assert same_file(second, pipe[1])
        os.close(first)
        os.close(second)


def test_more_descriptors_than_may_wait_are_refused(
    service: Service, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "MAX_DESCRIPTORS", 3)
    service.expect()
    with closing(service.connect()) as connection:
        for token in range(3):
            connection.send(token, pipe[0])
        with no_descriptor_leaks(), pytest.raises(DescriptorRefused, match="wait to be registered"):
            connection.send(3, pipe[0])
    service.server.forget(NONCE)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(min_size=1, max_size=64), count=st.integers(0, 3))
def test_no_packet_harms_the_server(
    data: bytes, count: int, service: Service, pipe: tuple[int, int]
) -> None:
    before = open_descriptors()
    raw = service.raw()
    with closing(raw.sock):
        assert raw.say(data, [pipe[0]] * count) != ""
    assert service.is_alive()
    assert eventually(lambda: open_descriptors() <= before)


# Ends.


def test_silent_connections_are_dropped_and_greeted_ones_stay(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_HELLO_SECONDS", 0.3)
    service.expect()
    silent = service.raw()
    with closing(silent.sock), closing(service.connect()) as connection:
        assert silent.is_dropped()
        time.sleep(0.3)
        connection.send(16, 0)
        assert service.gone == []
    service.server.forget(NONCE)


def test_a_connection_that_only_talks_nonsense_is_dropped_too(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_HELLO_SECONDS", 0.2)
    raw = service.raw()
    with closing(raw.sock):
        end = time.monotonic() + 5
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
        raw.sock.settimeout(1)
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
        before = open_descriptors()
        for token in range(5):
            connection.send(token, pipe[0])
        assert open_descriptors() == before + 5
        service.server.forget(NONCE)
        # The service's end of the connection goes too: who keeps old ones must not use them up.
        assert eventually(lambda: open_descriptors() == before - 1)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_REPLY_SECONDS", 0.2)
    with (
        no_descriptor_leaks(),
        closing(Mute(tmp_path)) as mute,
        closing(DescriptorConnection(mute.path, NONCE)) as connection,
    ):
        mute.thread.join()
        with pytest.raises(DescriptorRefused, match="descriptor 16: timed out"):
            connection.send(16, 0)


def test_a_late_answer_is_not_taken_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 is accepted too late, 17 refused: 17 must not count as accepted."""
    monkeypatch.setattr(descriptors, "_REPLY_SECONDS", 0.2)
    with (
        closing(Mute(tmp_path)) as mute,
        closing(DescriptorConnection(mute.path, NONCE)) as connection,
    ):
        mute.thread.join()
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
        pytest.raises(AssertionError, match="descriptors before"),
        no_descriptor_leaks(),
    ):
        raw.say(packet(DESCRIPTOR), [pipe[0]])
    for fd in leaked:
        os.close(fd)
