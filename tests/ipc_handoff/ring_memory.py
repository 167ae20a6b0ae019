"""One ring and both its ends in plain bytes."""

from hypothesis import strategies as st

from ipc_handoff.errors import RingLapped
from ipc_handoff.ring import RingConsumer, RingProducer

CAPACITY, SLOT = 4, 64
HEAD = 16
FIRST = SLOT  # Where the slot of message 1 begins: messages count from 1, slots from 0.
PAYLOAD = SLOT - HEAD

payloads = st.binary(max_size=PAYLOAD)


class Memory:
    """The bytes of one ring and both ends of it."""

    def __init__(self, capacity: int = CAPACITY, slot: int = SLOT) -> None:
        self.slots = bytearray(capacity * slot)
        self.consumed = bytearray(64)
        self.producer = RingProducer(memoryview(self.slots), memoryview(self.consumed), slot)
        self.consumer = RingConsumer(memoryview(self.slots), memoryview(self.consumed), slot)

    def claim_consumed(self, count: int) -> None:
        self.consumed[:8] = count.to_bytes(8, "little")


def take_or_nothing(consumer: RingConsumer) -> bytes | None:
    try:
        return consumer.take()
    except RingLapped:
        return None
