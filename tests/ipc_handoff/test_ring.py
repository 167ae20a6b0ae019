"""The step ring in one process: against a model, corrupted, and at its borders."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ipc_handoff import ring
from ipc_handoff.errors import RingFull, RingLapped
from ipc_handoff.ring import RingConsumer, RingProducer
from ipc_handoff.words import WORD_MAX
from tests.ipc_handoff.properties import unhurried
from tests.ipc_handoff.ring_memory import (
    CAPACITY,
    FIRST,
    HEAD,
    PAYLOAD,
    SLOT,
    Memory,
    payloads,
    take_or_nothing,
)


class RingAgainstModel(RuleBasedStateMachine):
    """What was posted is taken once, in order, unless the consumer's word lied."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.posted: list[bytes] = []
        self.taken = 0
        self.word = 0

    @rule(payload=payloads)
    def post(self, payload: bytes) -> None:
        if 0 <= len(self.posted) - self.word < CAPACITY:
            self.memory.producer.post(payload)
            self.posted.append(payload)
        else:
            with pytest.raises(RingFull):
                self.memory.producer.post(payload)

    @rule(extra=st.integers(1, 10))
    def post_too_much(self, extra: int) -> None:
        with pytest.raises(ValueError, match="a slot holds 48"):
            self.memory.producer.post(bytes(PAYLOAD + extra))

    @rule()
    def take(self) -> None:
        if len(self.posted) > self.taken + CAPACITY:
            with pytest.raises(RingLapped):
                self.memory.consumer.take()
        elif len(self.posted) > self.taken:
            assert self.memory.consumer.take() == self.posted[self.taken]
            self.taken += 1
            self.word = self.taken
        else:
            assert self.memory.consumer.take() is None

    @rule(word=st.one_of(st.integers(0, 30), st.just(WORD_MAX)))
    def write_nonsense_into_the_consumed_word(self, word: int) -> None:
        self.memory.claim_consumed(word)
        self.word = word

    @invariant()
    def consumed_word_is_the_consumers(self) -> None:
        assert int.from_bytes(self.memory.consumed[:8], "little") == self.word


TestRingAgainstModel = RingAgainstModel.TestCase
TestRingAgainstModel.settings = unhurried


# The checksum.


@unhurried
@given(payloads, st.integers(0, SLOT - 1), st.integers(1, 255))
def test_a_corrupt_byte_is_never_delivered(payload: bytes, position: int, flip: int) -> None:
    memory = Memory()
    memory.producer.post(payload)
    memory.slots[FIRST + position] ^= flip
    got = take_or_nothing(memory.consumer)
    assert got == (payload if position >= HEAD + len(payload) else None)


@unhurried
@given(payloads, st.lists(st.tuples(st.integers(0, SLOT - 1), st.integers(0, 255)), max_size=8))
def test_many_corrupt_bytes_are_never_delivered(
    payload: bytes, writes: list[tuple[int, int]]
) -> None:
    memory = Memory()
    memory.producer.post(payload)
    for position, value in writes:
        memory.slots[FIRST + position] = value
    assert take_or_nothing(memory.consumer) in (None, payload)


@unhurried
@given(st.binary(max_size=CAPACITY * SLOT))
def test_garbage_is_never_delivered(garbage: bytes) -> None:
    memory = Memory()
    memory.slots[: len(garbage)] = garbage
    assert take_or_nothing(memory.consumer) is None


def test_planted_reader_without_checksum_delivers_a_corrupt_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "_checksum", lambda sequence, payload: 0)
    memory = Memory()
    memory.producer.post(b"right")
    memory.slots[FIRST + HEAD] ^= 1
    assert memory.consumer.take() == b"sight"


@pytest.mark.parametrize("covered", ["payload", "sequence", "length"])
def test_checksum_covers(covered: str) -> None:
    base = ring._checksum(7, b"abc")
    other = {
        "payload": ring._checksum(7, b"abd"),
        "sequence": ring._checksum(8, b"abc"),
        "length": ring._checksum(7, b"abc\0"),
    }
    assert base != other[covered]


def test_planted_checksum_of_the_payload_alone_accepts_an_old_message_as_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pass_off_the_first_message_as_the_fifth() -> bytes | None:
        memory = Memory()
        for number in range(1, CAPACITY + 1):
            memory.producer.post(b"message %d" % number)
            memory.consumer.take()
        memory.slots[FIRST] = CAPACITY + 1
        return memory.consumer.take()

    assert pass_off_the_first_message_as_the_fifth() is None
    monkeypatch.setattr(ring, "_checksum", lambda sequence, payload: zlib.crc32(payload))
    assert pass_off_the_first_message_as_the_fifth() == b"message 1"


# Borders.


@pytest.mark.parametrize("size", [0, 1, PAYLOAD - 1, PAYLOAD])
def test_messages_up_to_the_slots_size_pass(size: int) -> None:
    memory = Memory()
    for number in range(3 * CAPACITY):
        memory.producer.post(bytes([number]) * size)
        assert memory.consumer.take() == bytes([number]) * size


def test_a_refused_message_leaves_the_ring_as_it_was() -> None:
    memory = Memory()
    memory.producer.post(b"first")
    before = bytes(memory.slots)
    with pytest.raises(ValueError, match="message of 49 bytes; a slot holds 48"):
        memory.producer.post(bytes(PAYLOAD + 1))
    assert bytes(memory.slots) == before
    memory.producer.post(b"second")
    assert [memory.consumer.take(), memory.consumer.take()] == [b"first", b"second"]


def test_a_full_ring_refuses_at_once_and_keeps_what_is_unread() -> None:
    memory = Memory()
    for number in range(CAPACITY):
        memory.producer.post(b"%d" % number)
    before = bytes(memory.slots)
    with pytest.raises(RingFull, match="4 messages are unread"):
        memory.producer.post(b"one too many")
    assert bytes(memory.slots) == before
    assert [memory.consumer.take() for _ in range(CAPACITY + 1)] == [b"0", b"1", b"2", b"3", None]
    memory.producer.post(b"room again")
    assert memory.consumer.take() == b"room again"


class NeverFull(RingProducer):
    """Planted: does not look whether there is room."""

    def post(self, payload: bytes) -> None:
        self._consumed.store(self._posted)
        super().post(payload)


def test_planted_producer_that_overruns_is_detected_by_the_consumer() -> None:
    memory = Memory()
    producer = NeverFull(memoryview(memory.slots), memoryview(memory.consumed), SLOT)
    for number in range(CAPACITY + 1):
        producer.post(b"%d" % number)
    with pytest.raises(RingLapped, match="message 1 was overwritten by 5"):
        memory.consumer.take()


class WaitsForMore(RingConsumer):
    """Planted: takes `>=` for `==` and so the newer message for the older."""

    def take(self) -> bytes | None:
        slot, word = self._slot(self._taken + 1)
        if word.load() < self._taken + 1:
            return None
        self._taken += 1
        return bytes(slot[HEAD : HEAD + int.from_bytes(slot[8:12], "little")])


def test_planted_consumer_that_tests_at_least_takes_another_message() -> None:
    memory = Memory()
    consumer = WaitsForMore(memoryview(memory.slots), memoryview(memory.consumed), SLOT)
    producer = NeverFull(memoryview(memory.slots), memoryview(memory.consumed), SLOT)
    for number in range(CAPACITY + 1):
        producer.post(b"%d" % number)
    assert consumer.take() == b"4"


@pytest.mark.parametrize("word", [2, 1000, WORD_MAX])
def test_a_consumed_word_ahead_of_the_producer_detaches(word: int) -> None:
    memory = Memory()
    memory.producer.post(b"only")
    memory.claim_consumed(word)
    with pytest.raises(RingFull):
        memory.producer.post(b"next")


def test_an_unreadable_slot_is_asked_for_again_and_not_skipped() -> None:
    memory = Memory()
    memory.producer.post(b"first")
    memory.producer.post(b"second")
    memory.slots[FIRST + HEAD] ^= 0xFF
    assert [memory.consumer.take() for _ in range(3)] == [None, None, None]
    memory.slots[FIRST + HEAD] ^= 0xFF
    assert [memory.consumer.take(), memory.consumer.take()] == [b"first", b"second"]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40))
def test_sequences_go_on_over_many_turns_of_any_capacity(capacity: int, turns: int) -> None:
    memory = Memory(capacity)
    for number in range(capacity * turns):
        memory.producer.post(b"%d" % number)
        assert memory.consumer.take() == b"%d" % number
