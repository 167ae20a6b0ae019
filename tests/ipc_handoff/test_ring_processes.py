"""The step ring between two processes, one of which may be killed at any moment."""

import random
import time
from collections.abc import Iterator

import pytest

from ipc_handoff.errors import RingFull, RingLapped
from ipc_handoff.ring import RingConsumer, RingProducer
from tests.ipc_handoff.support import RawMemory, content, peer, size_of
from tests.support.waiting import SOON, eventually

HEAD = 16
MESSAGES = 20_000
KILLS = 24


class SharedRing(RawMemory):
    def __init__(self, capacity: int, slot: int) -> None:
        super().__init__(64 + capacity * slot)
        self.slot = slot

    def consumer(self) -> RingConsumer:
        return RingConsumer(self.bytes[64:], self.bytes[:64], self.slot)

    def producer(self) -> RingProducer:
        return RingProducer(self.bytes[64:], self.bytes[:64], self.slot)


def expected(sequence: int, slot: int) -> bytes:
    return content(sequence, size_of(sequence, slot - HEAD))


@pytest.fixture
def shared() -> Iterator[SharedRing]:
    memory = SharedRing(64, 1024)
    yield memory
    memory.close()


def test_twenty_thousand_messages_of_all_sizes_arrive_whole_and_in_order(
    shared: SharedRing,
) -> None:
    consumer = shared.consumer()
    end = time.monotonic() + 4 * SOON
    arguments = (shared.fd, shared.slot, MESSAGES)
    with peer("produce", *arguments, descriptors=(shared.fd,)) as child:
        assert child.hear() == "posting"
        for sequence in range(1, MESSAGES + 1):
            while (message := consumer.take()) is None:
                assert time.monotonic() < end
            assert message == expected(sequence, shared.slot)
        assert child.end() == 0
    assert consumer.take() is None


def test_planted_reader_without_checksum_sees_torn_messages(shared: SharedRing) -> None:
    """It takes what a slot holds while the producer, never stopped, runs through the ring."""
    with peer("produce", shared.fd, shared.slot, 0, descriptors=(shared.fd,)) as child:
        assert child.hear() == "posting"
        consumed, torn = shared.bytes[:64].cast("Q"), 0
        end = time.monotonic() + SOON
        while not torn and time.monotonic() < end:
            for index in range(64):
                slot = shared.bytes[64 + index * 1024 : 64 + (index + 1) * 1024]
                sequence = int.from_bytes(slot[:8], "little")
                # Reads as a consumer does that lets the producer overwrite what it reads.
                consumed[0] = sequence
                payload = bytes(slot[HEAD : HEAD + size_of(max(sequence, 1), 1024 - HEAD)])
                torn += bool(sequence) and payload != expected(sequence, 1024)
    assert torn


def test_a_consumer_that_is_killed_fills_the_ring_and_never_blocks_the_producer(
    shared: SharedRing,
) -> None:
    producer, posted = shared.producer(), 0
    with peer("consume", shared.fd, shared.slot, descriptors=(shared.fd,)) as child:
        assert child.hear() == "taking"
        while posted < 500:
            try:
                producer.post(b"message")
                posted += 1
            except RingFull:
                time.sleep(0.0001)
    began = time.monotonic()
    with pytest.raises(RingFull):
        for _ in range(producer.capacity + 1):
            producer.post(b"nobody reads this")
    assert time.monotonic() - began < SOON


def test_a_producer_killed_at_any_moment_leaves_only_whole_messages() -> None:
    """Large messages: a kill nearly always falls into the middle of one."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    slot, in_the_middle, delivered = 1 << 20, 0, 0
    for _ in range(KILLS):
        shared = SharedRing(8, slot)
        consumer, sequence = shared.consumer(), 0
        with peer("produce", shared.fd, slot, 0, descriptors=(shared.fd,)) as child:
            assert child.hear() == "posting"
            end = time.monotonic() + moments.uniform(0, 0.01)
            while time.monotonic() < end:
                message = consumer.take()
                if message is not None:
                    sequence += 1
                    assert message == expected(sequence, slot), f"seed {seed}"
        while (message := consumer.take()) is not None:
            sequence += 1
            assert message == expected(sequence, slot), f"seed {seed}"
        delivered += sequence
        torn = shared.bytes[64 + (sequence + 1) % 8 * slot :][:slot]
        in_the_middle += torn[:8] == bytes(8) and torn[HEAD : HEAD + 64] != bytes(64)
        # Nor does asking again.
        assert [consumer.take() for _ in range(5)] == [None] * 5
        shared.close()
    assert delivered > 0
    assert in_the_middle > 0, f"no kill fell into the middle of a message (seed {seed})"


def test_a_lapped_consumer_in_another_process_is_told(shared: SharedRing) -> None:
    """The producer runs on because somebody else claims that all was read."""
    consumer = shared.consumer()
    with peer("produce", shared.fd, shared.slot, 0, descriptors=(shared.fd,)) as child:
        assert child.hear() == "posting"
        consumed, slots = shared.bytes[:64].cast("Q"), shared.bytes[64:].cast("Q")
        assert eventually(lambda: slots[0] == 64), "the ring did not fill"
        consumed[0] = 2
        assert eventually(lambda: slots[1024 // 8] == 65)
        with pytest.raises(RingLapped, match="message 1 was overwritten by 65"):
            consumer.take()
