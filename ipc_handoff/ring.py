"""A ring of messages in shared host memory: one producer, one consumer, nobody blocks.

The producer owns the slots, the consumer owns the `consumed` word. A slot is
`sequence u64 | length u32 | checksum u32 | payload`; the producer writes it in the order
sequence 0, payload, length and checksum, sequence. The consumer reads the sequence first.
The checksum covers sequence, length and payload, so a slot whose stores arrived out of
order (Arm), or that is being overwritten, is seen and read again.
"""

import struct
import zlib

from ipc_handoff.errors import RingFull, RingLapped
from ipc_handoff.words import Words

_HEAD = struct.Struct("<QII")
_SEQUENCE_BYTES = 8


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QI", sequence, len(payload))))


class _Ring:
    def __init__(self, slots: memoryview, consumed: memoryview, slot_bytes: int) -> None:
        self.capacity = len(slots) // slot_bytes
        self._slots = [slots[i * slot_bytes : (i + 1) * slot_bytes] for i in range(self.capacity)]
        self._sequences = [Words(slot[:_SEQUENCE_BYTES]) for slot in self._slots]
        self._consumed = Words(consumed)
        self.payload_bytes = slot_bytes - _HEAD.size

    def _slot(self, sequence: int) -> tuple[memoryview, Words]:
        index = sequence % self.capacity
        return self._slots[index], self._sequences[index]


class RingProducer(_Ring):
    """The writing end; the n-th message has sequence n, from 1."""

    def __init__(self, slots: memoryview, consumed: memoryview, slot_bytes: int) -> None:
        super().__init__(slots, consumed, slot_bytes)
        self._posted = 0

    def post(self, payload: bytes) -> None:
        """Append a message.

        Raises:
            RingFull: the consumer is `capacity` messages behind (or its word is nonsense).
            ValueError: the message does not fit into a slot.
        """
        if len(payload) > self.payload_bytes:
            raise ValueError(f"message of {len(payload)} bytes; a slot holds {self.payload_bytes}")
        if not 0 <= self._posted - self._consumed.load() < self.capacity:
            raise RingFull(f"{self.capacity} messages are unread")
        sequence = self._posted + 1
        slot, word = self._slot(sequence)
        word.store(0)
        slot[_HEAD.size : _HEAD.size + len(payload)] = payload
        checksum = _checksum(sequence, payload)
        slot[_SEQUENCE_BYTES : _HEAD.size] = struct.pack("<II", len(payload), checksum)
        word.store(sequence)
        self._posted = sequence


class RingConsumer(_Ring):
    """The reading end."""

    def __init__(self, slots: memoryview, consumed: memoryview, slot_bytes: int) -> None:
        super().__init__(slots, consumed, slot_bytes)
        self._taken = 0

    def take(self) -> bytes | None:
        """The next message, or None if it is not (wholly) there yet: then ask again.

        Raises:
            RingLapped: the producer overwrote messages that were never read.
        """
        expected = self._taken + 1
        slot, word = self._slot(expected)
        if word.load() < expected:
            return None
        head = bytes(slot[: _HEAD.size])
        sequence, length, checksum = _HEAD.unpack(head)
        if sequence > expected:
            raise RingLapped(f"message {expected} was overwritten by {sequence}")
        if length > self.payload_bytes:
            return None
        payload = bytes(slot[_HEAD.size : _HEAD.size + length])
        if sequence != expected or _checksum(sequence, payload) != checksum:
            return None
        self._taken = expected
        self._consumed.store(expected)
        return payload
