"""A descriptor server under test, and a peer that says what it likes."""

import os
import socket
import struct
from contextlib import closing
from pathlib import Path

from ipc_handoff.descriptors import DescriptorConnection, DescriptorServer, Inbox
from tests.support.waiting import SOON, eventually

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
        self.sock.settimeout(SOON)
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


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)
