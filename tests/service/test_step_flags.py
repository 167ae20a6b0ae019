"""A service's stream that sleeps: who wakes it, when, and what is left alone.

No GPU: operations on the stream are recorded, and the flags are what they are.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from indexer_service import step_flags
from indexer_service.step_flags import Sleeping
from ipc_handoff.flag_words import FlagLayout, FlagWords
from ipc_handoff.kernels.words import Gate
from ipc_handoff.regions import HostMemory

LAYERS, BOUND, ADDRESS = 3, 1.0, 1 << 20
ALL = range(LAYERS)


class Mapped:
    """What `MappedFlags` gives a stream."""

    def __init__(self, *_: object) -> None:
        self.layout, self.address, self.is_closed = FlagLayout(LAYERS), ADDRESS, False

    def close(self) -> None:
        self.is_closed = True


class Mark:
    is_done = False

    def query(self) -> bool:
        return self.is_done


class Bench:
    """Attributes:
    asleep: what the stream was told to wait for: (word's place in the block, value).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.is_over = 0.0, False
        self.asleep: list[tuple[int, int]] = []
        monkeypatch.setattr(step_flags, "MappedFlags", Mapped)
        monkeypatch.setattr(step_flags.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Sleeping, "_stream", lambda _: 7)
        monkeypatch.setattr(step_flags, "wait_at_least", self._sleep)
        self.memory = HostMemory.create(FlagLayout(LAYERS).size, "flags")
        self.words = FlagWords(self.memory.view(), LAYERS)
        self.flags = Sleeping(
            self.memory, LAYERS, torch.device("cuda", 0), BOUND, lambda: self.is_over
        )
        self.mark = self.flags.watched(Mark())

    def _sleep(self, stream: int, address: int, value: int) -> None:
        self.asleep.append((address - ADDRESS, value))

    def look(self, after: float = 0.0) -> None:
        """So many seconds later somebody asks whether the step is finished."""
        self.now += after
        assert not self.mark.query()

    def worker(self, *, published: int | None = None, **requests: int) -> None:
        """Raise flags as the worker does: `layer1=5`."""
        if published is not None:
            self.words.wake(published, ())
        for name, step in requests.items():
            ordinal = self.words._first_request + int(name.removeprefix("layer"))
            self.words._words.store(step, ordinal)

    def state(self) -> list[int]:
        """`published`, and each layer's request."""
        return [self.words.published(), *(self.words.request(ordinal) for ordinal in ALL)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.memory.close()


def test_the_stream_sleeps_for_the_step_and_gates_look_once(bench: Bench) -> None:
    layout = FlagLayout(LAYERS)
    bench.flags.begin(5, ALL)
    bench.flags.sleep(Gate.PUBLISHED)
    bench.flags.sleep(Gate.FIRST_LAYER, 0)
    bench.flags.sleep(Gate.LAYER, 2)
    assert bench.asleep == [(layout.published, 5), (layout.request(0), 5), (layout.request(2), 5)]
    assert bench.flags.gate_bound(1_000_000_000) == 0
    assert not bench.flags.can_capture


def test_a_worker_that_comes_needs_nobody(bench: Bench) -> None:
    bench.flags.begin(5, ALL)
    for change in ({"published": 5}, {"layer0": 5}, {"layer1": 5}):
        bench.look(0.9)  # each time a little earlier than the bound
        bench.worker(**change)
    bench.look(0.9)
    assert bench.state() == [5, 5, 5, 0]
    bench.worker(layer2=5)
    bench.look(9.0)
    assert bench.state() == [5, 5, 5, 5]


def test_a_worker_that_does_not_come_is_waited_for_as_long_as_a_gate_waits(bench: Bench) -> None:
    bench.flags.begin(5, ALL)
    bench.worker(published=5, layer0=5)
    bench.look()
    bench.look(0.99)
    assert bench.state() == [5, 5, 0, 0]
    bench.look(0.02)
    assert bench.state() == [5, 5, 5, 5]


def test_a_service_that_works_on_is_no_reason_to_wake_it(bench: Bench) -> None:
    bench.flags.begin(5, ALL)
    bench.worker(published=5, layer0=5)
    for window in range(1, 5):
        bench.words._words.store(window)  # progress
        bench.look(0.9)
    assert bench.state() == [5, 5, 0, 0]


def test_a_step_that_the_worker_has_left_is_woken_at_once_and_the_next_one_is_not(
    bench: Bench,
) -> None:
    bench.flags.begin(5, ALL)
    bench.flags.begin(6, ALL)
    bench.worker(published=5, layer0=5)
    bench.look()
    bench.worker(published=6)
    bench.look()
    assert bench.state() == [6, 5, 5, 5]
    bench.look()
    assert bench.state() == [6, 5, 5, 5], "it is still waited for"
    bench.look(1.1)
    assert bench.state() == [6, 6, 6, 6]


def test_only_the_step_s_own_layers_count(bench: Bench) -> None:
    bench.flags.begin(5, (1,))
    bench.worker(published=5, layer1=5)
    bench.look()
    bench.flags.begin(6, (0,))
    bench.look()
    bench.look(1.1)
    assert bench.state() == [6, 6, 5, 0]


@pytest.mark.parametrize("how", ["it is over", "wake", "newer words"])
def test_an_end_wakes_everything_and_takes_no_newer_word_back(bench: Bench, how: str) -> None:
    bench.flags.begin(5, ALL)
    bench.flags.begin(6, ALL)
    if how == "newer words":
        bench.worker(published=8, layer0=8)
    if how == "it is over":
        bench.is_over = True
        bench.look()
    else:
        bench.flags.wake()
    assert bench.state() == ([8, 8, 6, 6] if how == "newer words" else [6, 6, 6, 6])


def test_a_step_that_was_not_launched_is_told_behind_its_word(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[object, int, int]] = []
    monkeypatch.setattr(step_flags, "tell_given_up", lambda *given: told.append(given))
    memory: Any = object()
    bench.flags.given_up(memory, 5)
    assert told == [(memory, 5, ADDRESS + FlagLayout(LAYERS).answer(0))]


def test_nothing_is_begun_where_nobody_looks(bench: Bench) -> None:
    bench.look(9.0)
    assert bench.state() == [0, 0, 0, 0]
