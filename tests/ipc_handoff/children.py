"""What the peer processes of these tests do: `python -m tests.ipc_handoff.children NAME ...`.

Torch is imported only where it is needed: most peers start in tens of milliseconds.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable

from ipc_handoff.descriptors import DescriptorConnection
from ipc_handoff.ring import RingConsumer, RingProducer
from ipc_handoff.stamps import StampRing
from ipc_handoff.wakeups import Wakeup, sleep_until_any
from ipc_handoff.words import WORD_MAX, Words
from tests.ipc_handoff.support import content, size_of
from tests.support.waiting import SOON


def _say(line: object) -> None:
    print(line, flush=True)


def _map(fd: str) -> memoryview:
    return memoryview(mmap.mmap(int(fd), os.fstat(int(fd)).st_size))


# words


def echo_words(fd: str, rounds: str) -> None:
    """For every round: await the word, check the data it announces, answer one more."""
    shared = _map(fd)
    words, data = Words(shared[:128], 64), shared[128:]
    wrong = 0
    for expected in range(1, int(rounds) + 1):
        while words.load(0) != expected:
            pass
        wrong += data != bytes([expected % 256]) * len(data)
        words.store(expected, 1)
    _say(wrong)


def flip_word(fd: str, how: str) -> None:
    """Store 0 and WORD_MAX alternately until killed; `halves`: as two stores each."""
    shared = _map(fd)
    words, halves = Words(shared[:8]), shared[:8].cast("I")
    _say("flipping")
    while True:
        if how == "whole":
            words.store(WORD_MAX)
            words.store(0)
        else:
            for value in (2**32 - 1, 0):
                halves[0] = value
                halves[1] = value


# ring


def produce(fd: str, slot_bytes: str, messages: str) -> None:
    """Post that many messages (0: until killed), waiting in this test for a full ring."""
    shared, slot, last = _map(fd), int(slot_bytes), int(messages)
    ring = RingProducer(shared[64:], shared[:64], slot)
    _say("posting")
    sequence = 1
    while not last or sequence <= last:
        if sequence - Words(shared[:64]).load() > ring.capacity:
            continue
        ring.post(content(sequence, size_of(sequence, ring.payload_bytes)))
        sequence += 1


def consume(fd: str, slot_bytes: str) -> None:
    """Take messages until killed."""
    shared = _map(fd)
    ring = RingConsumer(shared[64:], shared[:64], int(slot_bytes))
    _say("taking")
    while True:
        ring.take()


# stamps


def stamp_steps(fd: str, layers: str, stages: str) -> None:
    """Step after step through a ring of one block, each cell holding the step's number."""
    ring = StampRing(_map(fd), int(layers), int(stages))
    _say("stamping")
    step = 0
    while True:
        step += 1
        ring.begin(step)
        for layer in range(int(layers)):
            for stage in range(int(stages)):
                ring.stamp(step, layer, stage, step)


# descriptors


def send_descriptors(path: str, nonce: str, tokens: str) -> None:
    """Send a memfd that holds its token for each, say so, and wait to be killed."""
    connection = DescriptorConnection(path, bytes.fromhex(nonce))
    for token in tokens.split(","):
        fd = os.memfd_create("sent")
        os.write(fd, token.encode())
        connection.send(int(token), fd)
        os.close(fd)
    _say(connection.peer.pid)
    sys.stdin.read()


# wakeups


def answer_rings(asked: str, answered: str, rounds: str) -> None:
    """Sleep until rung, clear, ring back."""
    here, there = Wakeup(int(asked)), Wakeup(int(answered))
    for _ in range(int(rounds)):
        if not sleep_until_any([here.fileno()], SOON):
            _say("slept too long")
            return
        here.clear()
        there.ring()
    _say("done")


# regions: these need torch


def own_memory(path: str, nonce: str, size: str) -> None:
    """A worker: make memory filled with 0..250, send it, then do as told."""
    import torch

    from ipc_handoff.regions import HostMemory, TensorSpec

    count = int(size)
    memory = HostMemory.create(count, "owned")
    tensor = memory.tensor(0, count, TensorSpec((count,), torch.uint8), "owned")
    tensor.copy_(torch.arange(count) % 251)
    connection = DescriptorConnection(path, bytes.fromhex(nonce))
    connection.send(16, memory.fileno())
    _say("sent")
    for line in sys.stdin:
        position, value = map(int, line.split())
        old = int(tensor[position])
        tensor[position] = value
        _say(old)


def open_memory(fd: str) -> None:
    """A service: map memory read-only and read out what it is asked for."""
    import torch

    from ipc_handoff.regions import HostMemory, TensorSpec

    memory = HostMemory.open(int(fd), writable=False)
    count = memory.byte_size
    tensor = memory.tensor(0, count, TensorSpec((count,), torch.uint8), "peer")
    _say("mapped")
    for line in sys.stdin:
        _say(int(tensor[int(line)]))


def crash_or_not() -> None:
    """Run each case in a fork of its own; say how each ended: 0, or minus its signal."""
    import torch

    from ipc_handoff.regions import HostMemory, TensorSpec

    size, spec = 1 << 16, TensorSpec((1 << 16,), torch.uint8)

    def write_through_a_read_only_tensor() -> None:
        owner = HostMemory.create(size, "read-only")
        memory = HostMemory.open(os.dup(owner.fileno()), writable=False)
        memory.tensor(0, size, spec, "x").fill_(1)

    def read_through_a_read_only_tensor() -> None:
        owner = HostMemory.create(size, "read-only")
        memory = HostMemory.open(os.dup(owner.fileno()), writable=False)
        memory.tensor(0, size, spec, "x").sum()

    def write_through_a_writable_tensor() -> None:
        owner = HostMemory.create(size, "writable")
        memory = HostMemory.open(os.dup(owner.fileno()), writable=True)
        memory.tensor(0, size, spec, "x").fill_(1)

    def read_after_close() -> None:
        memory = HostMemory.create(size, "closed")
        tensor = memory.tensor(0, size, spec, "x")
        memory.close()
        tensor.sum()

    def planted_read_of_a_closed_mmap() -> None:
        mapping = mmap.mmap(-1, size)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        mapping.close()
        tensor.sum()

    def planted_shrunk_file(sealed: bool) -> None:
        fd = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        if sealed:
            os.close(fd)
            fd = HostMemory.create(size, "sealed").fileno()
        tensor = torch.frombuffer(memoryview(mmap.mmap(fd, size)), dtype=torch.uint8)
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            assert sealed
        tensor.sum()

    cases: dict[str, Callable[[], None]] = {
        "write_through_a_read_only_tensor": write_through_a_read_only_tensor,
        "read_through_a_read_only_tensor": read_through_a_read_only_tensor,
        "write_through_a_writable_tensor": write_through_a_writable_tensor,
        "read_after_close": read_after_close,
        "planted_read_of_a_closed_mmap": planted_read_of_a_closed_mmap,
        "shrunk_sealed_file": lambda: planted_shrunk_file(True),
        "planted_shrunk_unsealed_file": lambda: planted_shrunk_file(False),
    }
    torch.set_num_threads(1)
    for name, case in cases.items():
        child = os.fork()
        if not child:
            try:
                case()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        _say(f"{name} {os.waitstatus_to_exitcode(status)}")


# processes


def send_nothing() -> None:
    """Live until killed."""
    _say("alive")
    sys.stdin.read()


def outlive_the_main_thread() -> None:
    """End the main thread only; another goes on for as long as stdin is open."""
    import ctypes
    import threading

    def rest() -> None:
        time.sleep(0.2)
        _say("main thread is gone")
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=rest).start()
    pthread_exit = ctypes.CDLL(None).pthread_exit
    pthread_exit(None)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
