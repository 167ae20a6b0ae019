"""Waking a peer that sleeps."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from ipc_handoff.errors import RegionError
from ipc_handoff.wakeups import Wakeup, sleep_until_any
from tests.ipc_handoff.support import peer
from tests.support.descriptors import no_descriptor_leaks
from tests.support.waiting import SOON

ROUNDS = 500
FULL = 2**64 - 2


@pytest.fixture
def wakeup() -> Wakeup:
    return Wakeup()


def test_two_processes_wake_each_other_and_lose_no_ring() -> None:
    here, there = Wakeup(), Wakeup()
    descriptors = (here.fileno(), there.fileno())
    with peer(
        "answer_rings", there.fileno(), here.fileno(), ROUNDS, descriptors=descriptors
    ) as child:
        for _ in range(ROUNDS):
            there.ring()
            assert sleep_until_any([here.fileno()], SOON) == [here.fileno()]
            here.clear()
        assert child.hear() == "done"


def test_a_ring_before_the_sleep_is_not_lost(wakeup: Wakeup) -> None:
    wakeup.ring()
    assert sleep_until_any([wakeup.fileno()], 0) == [wakeup.fileno()]


def test_rings_add_up_to_one_wake_up_and_clear_ends_it(wakeup: Wakeup) -> None:
    for _ in range(3):
        wakeup.ring()
    assert sleep_until_any([wakeup.fileno()], 0) == [wakeup.fileno()]
    wakeup.clear()
    assert sleep_until_any([wakeup.fileno()], 0) == []


def returns(action: Callable[[], None]) -> bool:
    """Whether it does, instead of blocking."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(SOON)
    return not thread.is_alive()


def test_clearing_what_did_not_ring_does_not_block(wakeup: Wakeup) -> None:
    assert returns(wakeup.clear)


def test_a_full_counter_does_not_block_the_ringer_and_still_wakes(wakeup: Wakeup) -> None:
    os.eventfd_write(wakeup.fileno(), FULL)
    assert returns(wakeup.ring)
    assert sleep_until_any([wakeup.fileno()], 0) == [wakeup.fileno()]
    wakeup.clear()
    assert sleep_until_any([wakeup.fileno()], 0) == []


def blocks(wakeup: Wakeup, seconds: float) -> bool:
    """Whether a ring into a full counter blocks for so long (then helps it out)."""
    os.eventfd_write(wakeup.fileno(), FULL)
    ringer = threading.Thread(target=wakeup.ring)
    ringer.start()
    ringer.join(seconds)
    blocked = ringer.is_alive()
    os.eventfd_read(wakeup.fileno())
    ringer.join()
    return blocked


def test_a_peer_s_blocking_eventfd_is_made_non_blocking_and_planted_as_it_came_blocks() -> None:
    assert not blocks(Wakeup(os.eventfd(0, 0)), SOON)
    planted = Wakeup(os.eventfd(0, 0))
    os.set_blocking(planted.fileno(), True)
    assert blocks(planted, 0.2)


def test_sleeping_ends_after_its_time(wakeup: Wakeup) -> None:
    began = time.monotonic()
    assert sleep_until_any([wakeup.fileno()], 0.05) == []
    assert 0.049 <= time.monotonic() - began < SOON
    assert sleep_until_any([wakeup.fileno()], -1.0) == []
    assert sleep_until_any([], 0.0) == []


def test_the_one_of_several_that_rang_is_named() -> None:
    one, two, three = Wakeup(), Wakeup(), Wakeup()
    two.ring()
    assert sleep_until_any([w.fileno() for w in (one, two, three)], SOON) == [two.fileno()]


def test_a_sleeper_is_woken_by_a_thread(wakeup: Wakeup) -> None:
    timer = threading.Timer(0.05, wakeup.ring)
    timer.start()
    began = time.monotonic()
    assert sleep_until_any([wakeup.fileno()], 2 * SOON) == [wakeup.fileno()]
    assert time.monotonic() - began < SOON
    timer.join()


def pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


OTHERS: dict[str, Callable[[], int]] = {
    "a pipe": pipe_end,
    "a memfd": lambda: os.memfd_create("x"),
    "a file": lambda: os.open(__file__, os.O_RDONLY),
}


@pytest.mark.parametrize("what", OTHERS)
def test_refused_and_closed(what: str) -> None:
    with no_descriptor_leaks():
        descriptor = OTHERS[what]()
        with pytest.raises(RegionError, match="not an eventfd"):
            Wakeup(descriptor)
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_closed_once_and_useless_afterwards() -> None:
    with no_descriptor_leaks():
        wakeup = Wakeup()
        wakeup.close()
        wakeup.close()
    for use in (wakeup.ring, wakeup.clear, wakeup.fileno):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_wake_up_is_closed_on_exec(wakeup: Wakeup) -> None:
    assert not os.get_inheritable(wakeup.fileno())


class RingsFirst:
    """Planted: rings before it writes its word."""

    def __init__(self, wakeup: Wakeup) -> None:
        self.word, self.wakeup = 0, wakeup

    def announce(self, sleep: threading.Event) -> None:
        self.wakeup.ring()
        sleep.wait(SOON)
        self.word = 1


def test_planted_ring_before_the_word_loses_the_wake_up(wakeup: Wakeup) -> None:
    """Why the ringer writes first: the sleeper looks, sees nothing, and sleeps on."""
    looked, ringer = threading.Event(), RingsFirst(wakeup)
    thread = threading.Thread(target=ringer.announce, args=(looked,))
    thread.start()
    assert sleep_until_any([wakeup.fileno()], SOON)
    wakeup.clear()
    seen = ringer.word
    looked.set()
    thread.join()
    assert (seen, ringer.word) == (0, 1)
    assert sleep_until_any([wakeup.fileno()], 0.05) == []
