"""The step ring in every state in which a reader can see a slot while it is written."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ipc_handoff import ring
from ipc_handoff.ring import RingProducer
from tests.ipc_handoff.ring_memory import (
    CAPACITY,
    FIRST,
    HEAD,
    SLOT,
    Memory,
    take_or_nothing,
)


class RecordedSlot:
    """Stands for a slot of a producer; keeps the stores in program order."""

    def __init__(self, stores: list[tuple[int, bytes]]) -> None:
        self.stores = stores

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.stores.append((where.start, bytes(data)))


class RecordedSequence:
    def __init__(self, stores: list[tuple[int, bytes]]) -> None:
        self.stores = stores

    def store(self, value: int) -> None:
        self.stores.append((0, value.to_bytes(8, "little")))


def stores_of(producer: RingProducer, payload: bytes) -> list[tuple[int, bytes]]:
    """What `post` stores into a slot: (offset, bytes) in program order."""
    stores: list[tuple[int, bytes]] = []
    broken: Any = producer
    broken._slots = [RecordedSlot(stores)] * producer.capacity
    broken._sequences = [RecordedSequence(stores)] * producer.capacity
    producer.post(payload)
    return stores


class SequenceFirst(RingProducer):
    """Planted: announces the message before it is written."""

    def post(self, payload: bytes) -> None:
        sequence = self._posted + 1
        slot, word = self._slot(sequence)
        word.store(sequence)
        slot[HEAD : HEAD + len(payload)] = payload
        head = len(payload).to_bytes(4, "little")
        slot[8:HEAD] = head + ring._checksum(sequence, payload).to_bytes(4, "little")
        self._posted = sequence


class WithoutReset(RingProducer):
    """Planted: leaves the old sequence standing over the new payload."""

    def post(self, payload: bytes) -> None:
        sequence = self._posted + 1
        slot, word = self._slot(sequence)
        slot[HEAD : HEAD + len(payload)] = payload
        head = len(payload).to_bytes(4, "little")
        slot[8:HEAD] = head + ring._checksum(sequence, payload).to_bytes(4, "little")
        word.store(sequence)
        self._posted = sequence


OLD, NEW = b"old message", b"new message"


def states(make: Callable[..., RingProducer], *, any_order: bool) -> list[bytes]:
    """A slot holding message 1, in every state while message CAPACITY + 1 is written into it.

    Args:
        any_order: any part of the stores may be visible (no order between them); else they
            become visible in program order.
    """
    memory = Memory()
    memory.producer.post(OLD)
    before = bytes(memory.slots[FIRST : FIRST + SLOT])
    writer = make(memoryview(bytearray(CAPACITY * SLOT)), memoryview(bytearray(64)), SLOT)
    for _ in range(CAPACITY):
        writer.post(OLD)
        writer._consumed.store(writer._posted)
    stores = stores_of(writer, NEW)
    visible: list[tuple[tuple[int, bytes], ...]]
    if any_order:
        visible = [
            order
            for count in range(len(stores) + 1)
            for order in itertools.permutations(stores, count)
        ]
    else:
        visible = [tuple(stores[:count]) for count in range(len(stores) + 1)]
    result = []
    for order in visible:
        slot = bytearray(before)
        for offset, data in order:
            slot[offset : offset + len(data)] = data
        result.append(bytes(slot))
    return list(dict.fromkeys(result))


class ChangingSlot:
    """A consumer's slot whose payload is read in a later state than its head."""

    def __init__(self, at_head: bytes, at_payload: bytes) -> None:
        self.at_head, self.at_payload = at_head, at_payload

    def __getitem__(self, where: slice) -> bytes:
        return (self.at_head if where.start is None else self.at_payload)[where]


class FixedSequence:
    def __init__(self, value: int) -> None:
        self.value = value

    def load(self) -> int:
        return self.value


def deliveries(slot_states: list[bytes], expecting: int) -> set[bytes]:
    """Everything a consumer that waits for message `expecting` can be given."""
    delivered = set()
    for at_word, at_head, at_payload in itertools.product(slot_states, repeat=3):
        memory = Memory()
        consumer: Any = memory.consumer
        consumer._taken = expecting - 1
        index = expecting % CAPACITY
        consumer._slots[index] = ChangingSlot(at_head, at_payload)
        consumer._sequences[index] = FixedSequence(int.from_bytes(at_word[:8], "little"))
        got = take_or_nothing(memory.consumer)
        if got is not None:
            delivered.add(got)
    return delivered


def test_stores_are_made_in_the_documented_order() -> None:
    memory = Memory()
    stores = stores_of(memory.producer, b"x" * 5)
    assert [offset for offset, _ in stores] == [0, HEAD, 8, 0]
    assert stores[0][1] == bytes(8)
    assert stores[-1][1] == (1).to_bytes(8, "little")


@pytest.mark.parametrize("make", [RingProducer, SequenceFirst, WithoutReset])
def test_no_order_of_stores_and_loads_delivers_a_torn_message(
    make: Callable[..., RingProducer],
) -> None:
    """The checksum alone suffices, as it must where stores have no order (Arm)."""
    seen = states(make, any_order=True)
    assert deliveries(seen, expecting=CAPACITY + 1) == {NEW}
    assert deliveries(seen, expecting=1) == {OLD}


def in_order_deliveries(make: Callable[..., RingProducer], expecting: int) -> set[bytes]:
    """As `deliveries`, with stores in order and a message that is read at once."""
    result = set()
    for state in states(make, any_order=False):
        result |= deliveries([state], expecting)
    return result


def test_order_and_reset_suffice_where_the_checksum_sees_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "_checksum", lambda sequence, payload: 0)
    assert in_order_deliveries(RingProducer, CAPACITY + 1) == {NEW}
    assert in_order_deliveries(RingProducer, 1) == {OLD}


def test_planted_sequence_before_payload_delivers_the_old_payload_as_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "_checksum", lambda sequence, payload: 0)
    assert in_order_deliveries(SequenceFirst, CAPACITY + 1) == {OLD, NEW}


def test_planted_producer_without_reset_delivers_the_new_payload_as_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "_checksum", lambda sequence, payload: 0)
    assert in_order_deliveries(WithoutReset, 1) == {OLD, NEW}


def test_planted_reader_without_checksum_is_given_torn_messages_when_stores_have_no_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "_checksum", lambda sequence, payload: 0)
    assert deliveries(states(RingProducer, any_order=True), CAPACITY + 1) >= {OLD, NEW}
