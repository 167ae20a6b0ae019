"""The process that ends waits from outside: in time, and no others."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from attention_worker.watchdog_process import Stalls
from ipc_handoff.flag_words import Answer, FlagLayout, FlagWords
from ipc_handoff.regions import HostMemory
from tests.support.waiting import SOON, eventually

LAYERS = 3
BOUND = 0.05


class Flags:
    """The block, with what worker and service write."""

    def __init__(self) -> None:
        self.memory = HostMemory.create(FlagLayout(LAYERS).size, "flags")
        self.words = FlagWords(self.memory.view(), LAYERS)
        self._all = self.words._words

    def request(self, ordinal: int, step: int) -> None:
        self._all.store(Answer.NONE, self.words._first_answer + ordinal)
        self._all.store(step, self.words._first_request + ordinal)

    def answer(self, ordinal: int) -> None:
        self._all.store(Answer.ANSWERED, self.words._first_answer + ordinal)

    def answer_of(self, ordinal: int) -> int:
        return self._all.load(self.words._first_answer + ordinal)

    def advance(self) -> None:
        self._all.store(self._all.load() + 1)


@pytest.fixture
def flags() -> Flags:
    return Flags()


def test_only_a_wait_without_progress_is_ended(flags: Flags) -> None:
    stalls = Stalls(flags.words, BOUND)
    assert stalls.abort_stalled(0.0, False) == []
    flags.request(1, 7)
    assert stalls.abort_stalled(0.0, False) == []
    assert stalls.abort_stalled(0.04, False) == []
    flags.advance()
    assert stalls.abort_stalled(0.06, False) == [], "the service works"
    assert stalls.abort_stalled(0.1, False) == []
    assert stalls.abort_stalled(0.12, False) == [1]
    assert flags.answer_of(1) == Answer.ABORTED
    assert stalls.abort_stalled(0.5, False) == [], "it is not waited for any more"


def test_an_answer_and_a_newer_request_begin_anew(flags: Flags) -> None:
    stalls = Stalls(flags.words, BOUND)
    flags.request(0, 7)
    assert stalls.abort_stalled(0.0, False) == []
    flags.answer(0)
    assert stalls.abort_stalled(0.04, False) == []
    flags.request(0, 8)
    assert stalls.abort_stalled(0.045, False) == []
    flags.request(0, 9)
    assert stalls.abort_stalled(0.08, False) == []
    assert stalls.abort_stalled(0.12, False) == []
    assert stalls.abort_stalled(0.13, False) == [0]


def test_a_layer_that_nobody_asked_for_is_left_alone(flags: Flags) -> None:
    stalls = Stalls(flags.words, BOUND)
    assert stalls.abort_stalled(0.0, True) == []
    flags.request(2, 1)
    flags.answer(2)
    assert stalls.abort_stalled(9.0, True) == []
    assert flags.answer_of(2) == Answer.ANSWERED


@pytest.fixture
def peer(flags: Flags, request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A running watchdog's other end; the parameter is its bound in seconds."""
    ours, theirs = socket.socketpair()
    numbers = (flags.memory.fileno(), theirs.fileno())
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "attention_worker.watchdog_process",
            *map(str, numbers),
            f"{LAYERS}",
            f"{request.param}",
        ],
        pass_fds=numbers,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    theirs.close()
    yield ours
    ours.close()
    assert process.wait(SOON) == 0, "it ends with the worker"


@pytest.mark.parametrize("peer", [0.5], indirect=True)
def test_a_stall_is_ended_by_the_process(flags: Flags, peer: socket.socket) -> None:
    began = time.monotonic()
    flags.request(0, 3)
    assert eventually(lambda: flags.answer_of(0) == Answer.ABORTED)
    assert time.monotonic() - began >= 0.5


def _is_read(ours: socket.socket) -> bool:
    """Whether the other end has taken all that was sent."""
    (unread,) = struct.unpack("i", fcntl.ioctl(ours, termios.TIOCOUTQ, bytes(4)))
    return bool(unread == 0)


@pytest.mark.parametrize("peer", [2 * SOON], indirect=True)
def test_a_death_ends_waits_at_once(flags: Flags, peer: socket.socket) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as service:
        descriptor = os.pidfd_open(service.pid)
        socket.send_fds(peer, [b"."], [descriptor])
        os.close(descriptor)
        service.kill()
    flags.request(0, 3)
    assert eventually(lambda: flags.answer_of(0) == Answer.ABORTED)
    socket.send_fds(peer, [b"."], [])
    assert eventually(lambda: _is_read(peer))
    flags.request(1, 4)
    assert not eventually(lambda: flags.answer_of(1) == Answer.ABORTED, seconds=0.1)


def test_it_needs_neither_torch_nor_cuda() -> None:
    program = (
        "import sys, attention_worker.watchdog_process; "
        "assert not {'torch', 'cuda', 'triton'} & set(sys.modules), 'heavy'"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
