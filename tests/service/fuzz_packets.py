"""Random packets for the descriptor socket."""

import os
import random
import socket
import struct
from array import array
from collections import Counter
from contextlib import suppress

import grpc

from ipc_handoff.descriptors import NONCE_BYTES
from tests.service.mutations import EDGES
from tests.service.support import LocalService, Worker
from tests.service.tally import tally
from tests.support.waiting import SOON, eventually

_PACKET = struct.Struct("<4sHH16sQ")
_REPLY = struct.Struct("<H")
_MOST_PACKETS = 4
_SENT = "/dev/zero"
_SOON = SOON
_REPLY_SECONDS = SOON


def _sent_descriptors() -> int:
    """How many of what is sent here are open, on either side: both are in this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}") == _SENT
    return found


class Packets:
    """Strangers, and a worker with its right nonce; each connection is a new one."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._stub = service.stub()
        self._worker = Worker(service, stub=self._stub)
        self._counts: Counter[str] = Counter()
        self._before = _sent_descriptors()
        self._path = str(service.directory / self._worker.session.descriptor_socket)

    def send(self, chance: random.Random) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_REPLY_SECONDS)
            connection.connect(self._path)
            for _ in range(1 + chance.randrange(_MOST_PACKETS)):
                # It may hang up on us at any time.
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._send_one(connection, chance)
        try:
            self._worker.keep_alive()
        except grpc.RpcError:
            # A connection with the right nonce that ends is the worker's death.
            self._counts["sessions ended"] += 1
            self._worker.leave()
            self._worker = Worker(self._service, stub=self._stub)

    def _send_one(self, connection: socket.socket, chance: random.Random) -> None:
        data = chance.randbytes(chance.randrange(1, 80))
        if chance.randrange(4):
            data = _PACKET.pack(
                chance.choice((b"DSAd", b"DSAd", b"DSAd", chance.randbytes(4))),
                chance.choice((1, 1, 1, chance.getrandbits(16))),
                chance.choice((1, 2, chance.getrandbits(16))),
                self._nonce(chance),
                chance.choice([*(e for e in EDGES if e < 2**64), chance.getrandbits(64)]),
            )
        opened = [os.open(_SENT, os.O_RDONLY) for _ in range(chance.choice((0, 0, 1, 1, 5)))]
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", opened))] if opened else []
            connection.sendmsg([data], rights)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if chance.randrange(2):
            reply = connection.recv(512)
            refused = _REPLY.unpack(reply[: _REPLY.size])[0] if len(reply) >= _REPLY.size else None
            self._counts["hung up" if refused is None else "refused" if refused else "taken"] += 1

    def _nonce(self, chance: random.Random) -> bytes:
        if chance.randrange(3) == 0:
            return chance.randbytes(NONCE_BYTES)
        return self._worker.session.descriptor_nonce

    def close(self) -> None:
        with suppress(grpc.RpcError):  # its death was noticed a moment ago
            self._worker.close()
        self._worker.leave()
        assert eventually(lambda: _sent_descriptors() <= self._before, _SOON), (
            "descriptors stay open"
        )

    def __str__(self) -> str:
        return tally(self._counts)
