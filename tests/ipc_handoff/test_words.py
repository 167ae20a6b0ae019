"""Words between two processes."""

import time

import pytest

from ipc_handoff.words import WORD_MAX, Words
from tests.ipc_handoff.support import RawMemory, peer
from tests.support.waiting import SOON

ROUNDS = 1000


def test_data_stored_before_a_word_is_there_after_it_in_another_process() -> None:
    memory = RawMemory(4096)
    words, data = Words(memory.bytes[:128], 64), memory.bytes[128:]
    with peer("echo_words", memory.fd, ROUNDS, descriptors=(memory.fd,)) as child:
        for value in range(1, ROUNDS + 1):
            data[:] = bytes([value % 256]) * len(data)
            words.store(value, 0)
            while words.load(1) != value:
                assert child.process.poll() is None
        assert child.hear() == "0"
    memory.close()


def test_planted_word_before_its_data_shows_the_old_data() -> None:
    memory = RawMemory(4096)
    words, data = Words(memory.bytes[:128], 64), memory.bytes[128:]
    with peer("echo_words", memory.fd, 50, descriptors=(memory.fd,)) as child:
        for value in range(1, 51):
            words.store(value, 0)
            while words.load(1) != value:
                assert child.process.poll() is None
            data[:] = bytes([value % 256]) * len(data)
        assert child.hear() == "50"
    memory.close()


@pytest.mark.parametrize(("how", "torn"), [("whole", False), ("halves", True)])
def test_a_word_is_never_torn_and_planted_half_stores_are_seen(how: str, torn: bool) -> None:
    memory = RawMemory(4096)
    word = Words(memory.bytes[:8])
    with peer("flip_word", memory.fd, how, descriptors=(memory.fd,)) as child:
        assert child.hear() == "flipping"
        seen, end = set[int](), time.monotonic() + SOON
        while time.monotonic() < end and (len(seen) < 2 or (torn and seen <= {0, WORD_MAX})):
            seen |= {word.load() for _ in range(20_000)}
    assert (seen - {0, WORD_MAX} != set()) == torn
    memory.close()


def test_stride_puts_each_word_on_its_own_cache_line() -> None:
    buffer = bytearray(4 * 64)
    words = Words(memoryview(buffer), 64)
    assert len(words) == 4
    for index in range(4):
        words.store(index + 1, index)
    expected = bytearray(4 * 64)
    for index in range(4):
        expected[index * 64] = index + 1
    assert buffer == expected
    assert [words.load(index) for index in range(4)] == [1, 2, 3, 4]


def test_extremes_and_out_of_range_values() -> None:
    word = Words(memoryview(bytearray(8)))
    word.store(WORD_MAX)
    assert word.load() == WORD_MAX
    for value in (-1, WORD_MAX + 1):
        with pytest.raises(ValueError):
            word.store(value)
    assert word.load() == WORD_MAX
    with pytest.raises(IndexError):
        word.load(1)


@pytest.mark.parametrize(("size", "stride"), [(64, 12), (60, 8), (64, 1)])
def test_sizes_that_split_a_word_are_refused(size: int, stride: int) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        Words(memoryview(bytearray(size)), stride)
