"""Descriptors over the Unix socket: the secret, the refusals, and no leak in any."""

import os
import socket
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc_handoff import descriptors
from ipc_handoff.descriptors import Peer
from ipc_handoff.errors import DescriptorRefused
from tests.ipc_handoff.descriptor_peers import (
    DESCRIPTOR,
    HELLO,
    NONCE,
    OTHER,
    Service,
    packet,
    same_file,
)
from tests.ipc_handoff.support import peer
from tests.support.descriptors import no_descriptor_leaks
from tests.support.waiting import eventually

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
    with no_descriptor_leaks():
        raw = service.raw()
        with closing(raw.sock):
            assert raw.say(data, [pipe[0]] * count) != ""
        assert service.is_alive()
