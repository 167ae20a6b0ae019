"""Stage stamps and their generations."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc_handoff.layout import stamp_block_bytes
from ipc_handoff.stamps import StampRing
from tests.ipc_handoff.properties import unhurried
from tests.ipc_handoff.support import RawMemory, peer
from tests.support.waiting import SOON

LAYERS, STAGES, STEPS = 3, 5, 4
BLOCK = stamp_block_bytes(LAYERS, STAGES)


def make_ring(steps: int = STEPS) -> StampRing:
    return StampRing.private(steps, LAYERS, STAGES)


def test_stamps_come_back_by_layer_and_stage() -> None:
    ring = make_ring()
    ring.begin(7)
    for layer in range(LAYERS):
        for stage in range(STAGES):
            ring.stamp(7, layer, stage, 100 * layer + stage + 1)
    assert ring.read(7) == [
        [100 * layer + stage + 1 for stage in range(STAGES)] for layer in range(LAYERS)
    ]
    assert ring.lost == 0


def test_stages_that_were_not_reached_are_zero_even_in_a_used_block() -> None:
    ring = make_ring()
    ring.begin(1)
    for stage in range(STAGES):
        ring.stamp(1, 2, stage, 9)
    ring.begin(1 + STEPS)
    assert ring.read(1 + STEPS) == [[0] * STAGES] * LAYERS


def test_a_stamp_is_the_time_of_day_in_nanoseconds() -> None:
    ring, before = make_ring(), time.monotonic_ns()
    ring.begin(1)
    ring.stamp(1, 0, 0)
    times = ring.read(1)
    assert times is not None
    assert before <= times[0][0] <= time.monotonic_ns()


def test_overwritten_stamps_are_counted_and_not_shown() -> None:
    ring = make_ring()
    for step in range(1, 2 * STEPS + 1):
        ring.begin(step)
        ring.stamp(step, 0, 0, step)
    assert [ring.read(step) for step in range(1, STEPS + 1)] == [None] * STEPS
    assert ring.lost == STEPS
    for step in range(STEPS + 1, 2 * STEPS + 1):
        times = ring.read(step)
        assert times is not None
        assert times[0][0] == step
    assert ring.lost == STEPS


def test_a_late_stamp_never_appears_in_the_step_that_took_the_block() -> None:
    ring = make_ring()
    ring.begin(1)
    ring.begin(1 + STEPS)
    ring.stamp(1, 0, 0, 111)
    assert ring.read(1 + STEPS) == [[0] * STAGES] * LAYERS


def test_a_stamp_of_a_step_that_never_began_is_dropped() -> None:
    ring = make_ring()
    ring.begin(2)
    ring.stamp(2 + STEPS, 0, 0, 111)
    assert ring.read(2) == [[0] * STAGES] * LAYERS


@unhurried
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, LAYERS - 1)), max_size=60))
def test_only_the_newest_step_of_a_block_is_shown(moves: list[tuple[int, int]]) -> None:
    """Steps in any order; each stamp holds its step's number."""
    ring, holds = make_ring(), dict[int, int]()
    for step, layer in moves:
        if holds.get(step % STEPS) != step:
            ring.begin(step)
            holds[step % STEPS] = step
        ring.stamp(step, layer, 0, step)
    for step in range(1, 41):
        times = ring.read(step)
        if holds.get(step % STEPS) == step:
            assert times is not None
            assert {value for row in times for value in row} == {0, step}
        else:
            assert times is None


# A reader that is overtaken while it copies.


class OneLook(StampRing):
    """Planted: does not look at the generation again."""

    def read(self, step: int) -> Any:
        index = step % len(self._bodies)
        before = self._generations[index].load()
        cells = self._bodies[index][: self._cells].tolist()
        if before != step:
            self.lost += 1
            return None
        return [cells[i : i + self._stages] for i in range(0, self._cells, self._stages)]


class Overtaken:
    """Stands for a block's body; something happens while it is copied."""

    def __init__(self, body: memoryview, meanwhile: Callable[[], None]) -> None:
        self.body, self.meanwhile = body, meanwhile

    def __getitem__(self, where: slice) -> "Overtaken":
        return self

    def tolist(self) -> list[int]:
        first = self.body.tolist()[: LAYERS * STAGES // 2]
        self.meanwhile()
        return first + self.body.tolist()[len(first) : LAYERS * STAGES]


@pytest.mark.parametrize(("reader_class", "mixed"), [(StampRing, False), (OneLook, True)])
def test_a_reader_overtaken_in_its_copy_shows_nothing_and_without_a_second_look_shows_both(
    reader_class: type[StampRing], mixed: bool
) -> None:
    memory = memoryview(bytearray(BLOCK * STEPS))
    writer, reader = StampRing(memory, LAYERS, STAGES), reader_class(memory, LAYERS, STAGES)

    def fill(step: int) -> None:
        writer.begin(step)
        for layer in range(LAYERS):
            for stage in range(STAGES):
                writer.stamp(step, layer, stage, step)

    fill(1)
    slow: Any = reader
    slow._bodies[1] = Overtaken(reader._bodies[1], lambda: fill(1 + STEPS))
    times = reader.read(1)
    if mixed:
        assert times is not None
        assert {value for row in times for value in row} == {1, 1 + STEPS}
    else:
        assert times is None
        assert reader.lost == 1


@pytest.mark.parametrize(("reader_class", "mixed"), [(StampRing, False), (OneLook, True)])
def test_a_writer_in_another_process_never_mixes_steps_and_without_a_second_look_does(
    reader_class: type[StampRing], mixed: bool
) -> None:
    """One block of many cells, taken by step after step as fast as the other process can."""
    layers, stages = 64, 5
    memory = RawMemory(stamp_block_bytes(layers, stages))
    reader = reader_class(memory.bytes, layers, stages)
    wrong = shown = 0
    with peer("stamp_steps", memory.fd, layers, stages, descriptors=(memory.fd,)) as child:
        assert child.hear() == "stamping"
        end = time.monotonic() + (SOON if mixed else 1)
        while time.monotonic() < end and not (mixed and wrong):
            step = reader._generations[0].load()
            times = reader.read(step) if step else None
            if times is not None:
                shown += 1
                wrong += not {value for row in times for value in row} <= {0, step}
    assert shown
    assert reader.lost or mixed
    assert bool(wrong) == mixed
    memory.close()
