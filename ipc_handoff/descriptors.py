"""File descriptors between two processes, over a Unix socket: gRPC cannot carry them.

The worker connects, says the session's nonce (a secret that it got over gRPC) and sends
descriptors under numbers of its choice (tokens); the service takes them by token when a
region names it. The connection stays open: its end says that the worker is gone. Packets
keep their borders (SOCK_SEQPACKET), every packet is answered.
"""

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

from ipc_handoff.errors import DescriptorRefused

logger = logging.getLogger(__name__)

_PACKET = struct.Struct("<4sHH16sQ")  # magic, protocol version, kind, nonce, token
_REPLY = struct.Struct("<H")  # 0: done; else refused, with text
_MAGIC = b"DSAd"
_PROTOCOL_VERSION = 1
_DESCRIPTOR = struct.Struct("i")
# Room for a few, so that too many in a packet are seen; the kernel closes the others.
_ANCILLARY_BYTES = socket.CMSG_LEN(4 * _DESCRIPTOR.size)
_CREDENTIALS = struct.Struct("3i")
NONCE_BYTES = 16
# Well-known tokens: the eventfds that wake each side. Regions count from the third on.
WAKE_SERVICE_TOKEN = 1
WAKE_WORKER_TOKEN = 2
FIRST_REGION_TOKEN = 16
MAX_CONNECTIONS = 256
MAX_DESCRIPTORS = 1024
_HELLO_SECONDS = 5.0
_REPLY_SECONDS = 5.0
_PAUSE_SECONDS = 0.05
_TEXT_BYTES = 256


class _Kind(IntEnum):
    HELLO = 1
    DESCRIPTOR = 2


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says. pid is 0 across PID namespaces."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """SO_PEERCRED of a connected Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


@dataclass
class Inbox:
    """Descriptors that arrived for one session.

    Attributes:
        on_gone: called once, from the socket's thread, when the worker's connection ends.
    """

    on_gone: Callable[[], None]
    peer: Peer | None = None
    _connection: socket.socket | None = None
    _descriptors: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def connect(self, connection: socket.socket, peer: Peer) -> None:
        """Remember the worker's connection."""
        with self._lock:
            self.peer, self._connection = peer, connection

    def put(self, token: int, descriptor: int) -> str:
        """Keep a descriptor; the reason if it is refused (then the caller still owns it)."""
        with self._lock:
            if self._closed:
                return "the session is closed"
            if token in self._descriptors:
                return f"token {token} is in use"
            if len(self._descriptors) >= MAX_DESCRIPTORS:
                return f"{MAX_DESCRIPTORS} descriptors wait to be registered"
            self._descriptors[token] = descriptor
            return ""

    def take(self, token: int) -> int | None:
        """The descriptor sent under `token`, now the caller's; None if there is none."""
        with self._lock:
            return self._descriptors.pop(token, None)

    def close(self) -> None:
        """Close what was not taken, and end the worker's connection."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                with suppress(OSError):  # the worker's end may be first
                    self._connection.shutdown(socket.SHUT_RDWR)
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer = peer_of(sock)
        self.inbox: Inbox | None = None
        self.since = time.monotonic()


class DescriptorServer:
    """The service's end, with a thread of its own.

    Args:
        path: of the socket; must not exist, its directory must belong to us.
    """

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._expected: dict[bytes, Inbox] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop_writer: int | None
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def expect(self, nonce: bytes, on_gone: Callable[[], None]) -> Inbox:
        """Accept one connection that says `nonce`."""
        inbox = Inbox(on_gone)
        with self._lock:
            self._expected[nonce] = inbox
        return inbox

    def forget(self, nonce: bytes) -> None:
        """Accept no connection with this nonce any more; close its inbox."""
        with self._lock:
            inbox = self._expected.pop(nonce, None)
        if inbox is not None:
            inbox.close()

    def close(self) -> None:
        """End the thread and every connection. Closing again does nothing."""
        if self._stop_writer is None:
            return
        os.write(self._stop_writer, b"x")
        self._thread.join()
        for connection in list(self._connections):
            connection.sock.close()
        for nonce in list(self._expected):
            self.forget(nonce)
        self._listener.close()
        self._selector.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)
        self._stop_writer = None

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj == self._stop_reader:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            self._drop_the_silent()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, most likely: the listener stays readable, so do not spin.
            logger.warning("descriptors: cannot accept a connection: %s", error)
            time.sleep(_PAUSE_SECONDS)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _drop_the_silent(self) -> None:
        limit = time.monotonic() - _HELLO_SECONDS
        for connection in [c for c in self._connections if c.inbox is None and c.since < limit]:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._connections.discard(connection)
        if connection.inbox is not None:
            try:
                connection.inbox.on_gone()
            except Exception:
                logger.exception("descriptors: a session could not be told of its worker's end")

    def _receive(self, connection: _Connection) -> None:
        try:
            # Not socket.recv_fds: Python 3.11's ignores the flag.
            packet, ancillary, _, _ = connection.sock.recvmsg(
                _PACKET.size + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            packet, ancillary = b"", []
        descriptors = [fd for _, _, data in ancillary for (fd,) in _DESCRIPTOR.iter_unpack(data)]
        if not packet:
            # The end, or an empty packet, which may carry descriptors.
            for descriptor in descriptors:
                os.close(descriptor)
            self._drop(connection)
            return
        refusal = self._handle(connection, packet, descriptors)
        try:
            connection.sock.send(_REPLY.pack(bool(refusal)) + refusal.encode()[:_TEXT_BYTES])
        except OSError:
            self._drop(connection)

    def _handle(self, connection: _Connection, packet: bytes, descriptors: list[int]) -> str:
        """Do what a packet says; the reason if it is refused. Owns the descriptors."""
        kept = False
        try:
            if len(packet) != _PACKET.size:
                return f"a packet of {len(packet)} bytes, expected {_PACKET.size}"
            magic, version, kind, nonce, token = _PACKET.unpack(packet)
            if magic != _MAGIC or version != _PROTOCOL_VERSION:
                return f"descriptor protocol {version}, expected {_PROTOCOL_VERSION}"
            if kind == _Kind.HELLO:
                return self._hello(connection, nonce)
            if kind != _Kind.DESCRIPTOR or connection.inbox is None:
                return "expected the session's nonce first"
            if len(descriptors) != 1:
                return f"{len(descriptors)} descriptors in a packet, expected 1"
            refusal = connection.inbox.put(token, descriptors[0])
            kept = not refusal
            return refusal
        finally:
            if not kept:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _hello(self, connection: _Connection, nonce: bytes) -> str:
        if connection.peer.uid not in (0, os.geteuid()):
            return f"user {connection.peer.uid} is not the service's user"
        if connection.inbox is not None:
            return "the connection has a session already"
        with self._lock:
            inbox = self._expected.get(nonce)
            if inbox is None:
                return "no open session has this nonce"
            if inbox.peer is not None:
                return "the session has a connection already"
            inbox.connect(connection.sock, connection.peer)
        connection.inbox = inbox
        return ""


class DescriptorConnection:
    """The worker's end.

    Raises:
        DescriptorRefused: nobody listens, or the nonce is not known.
    """

    def __init__(self, path: str, nonce: bytes) -> None:
        self._nonce = nonce
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_REPLY_SECONDS)
        try:
            self._sock.connect(path)
            self.peer = peer_of(self._sock)
            self._ask(_Kind.HELLO, 0, [])
        except (OSError, DescriptorRefused) as error:
            self._sock.close()
            raise DescriptorRefused(f"descriptor socket {path}: {error}") from error

    def send(self, token: int, descriptor: int) -> None:
        """Send a descriptor (a duplicate arrives) under `token`."""
        try:
            self._ask(_Kind.DESCRIPTOR, token, [descriptor])
        except OSError as error:
            raise DescriptorRefused(f"descriptor {token}: {error}") from error

    def _ask(self, kind: _Kind, token: int, descriptors: list[int]) -> None:
        packet = _PACKET.pack(_MAGIC, _PROTOCOL_VERSION, kind, self._nonce, token)
        try:
            socket.send_fds(self._sock, [packet], descriptors)
            reply = self._sock.recv(_REPLY.size + _TEXT_BYTES)
        except OSError:
            # Over: a late reply would be taken for the next packet's.
            self._sock.close()
            raise
        if len(reply) < _REPLY.size:
            raise DescriptorRefused("the service closed the connection")
        if _REPLY.unpack(reply[: _REPLY.size])[0]:
            raise DescriptorRefused(reply[_REPLY.size :].decode(errors="replace"))

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()
