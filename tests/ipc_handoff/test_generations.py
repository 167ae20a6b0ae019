"""Whose data a slot holds, also where stores and loads change places."""

from typing import Any

import pytest

from ipc_handoff import generations
from ipc_handoff.control import ServiceControl, WorkerControl
from ipc_handoff.generations import Generation, _Slots, named
from tests.ipc_handoff.support import GEOMETRY
from tests.ipc_handoff.weak_memory import FENCE, Event, Program, outcomes, without_fence

EPOCH = 3


def test_each_slot_says_whose_data_it_holds() -> None:
    worker = WorkerControl(memoryview(bytearray(GEOMETRY.control.size)), GEOMETRY)
    worker.start(EPOCH)
    service = ServiceControl(worker._buffer, GEOMETRY, EPOCH)
    newer = 5 + GEOMETRY.slots
    for name, writer, reader in (
        ("inputs", worker, service),
        ("layers", worker, service),
        ("answers", service, worker),
    ):
        write, read = getattr(writer.generations, name), getattr(reader.generations, name)
        assert read.of(5) == Generation(0, 0, False)
        write.begin(5, 1)
        assert read.of(5) == Generation(5, 1, False)
        write.end(5, 1)
        write.end(6, 0)
        assert (read.of(5), read.of(6)) == (Generation(5, 1), Generation(6, 0))
        write.begin(newer)
        assert read.of(5) == Generation(newer, 0, False)
        assert read.of(6) == Generation(6, 0)


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("layer", [0, 1, 60])
@pytest.mark.parametrize("step", [1, 2**40])
def test_a_word_holds_step_and_layer(step: int, layer: int, is_written: bool) -> None:
    made = Generation(step, layer, is_written)
    assert Generation.of(made.word) == made
    assert Generation(step, layer, False) < Generation(step, layer)
    assert made < Generation(step, layer + 1, False) < Generation(step + 1, 0, False)


def test_people_read_layers_by_their_ids() -> None:
    assert named(Generation(7, 1), (3, 9)) == "step 7, layer 9"
    assert named(Generation(7, 1, False), (3, 9)) == "step 7, layer 9, being written"
    assert named(Generation(7, 5), (3, 9)) == "step 7, layer unknown"
    assert named(Generation(0, 0, False), (3, 9)) == "nothing yet"


OLD, NEW = 5, 6


class Rewritten:
    """A slot that holds step 5's data is written for step 6 while a reader asks for either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = Program(monkeypatch, (generations,))
        self.data = self.program.cells("data")
        self.slots: Any = object.__new__(_Slots)
        self.slots._words = self.program.word("word")
        self.slots._slots = 1
        self.before = {"word0": Generation(OLD).word, "data0": OLD}
        self.writer = self.program.record(self.write)
        self.reader = self.program.record(self.read)

    def write(self) -> None:
        self.slots.begin(NEW)
        self.data[0] = NEW
        self.slots.end(NEW)

    def read(self) -> tuple[Generation, int, Generation]:
        return self.slots.of(NEW), self.data[0], self.slots.of(NEW)

    def unseen(self, writer: list[Event], reader: list[Event]) -> set[tuple[int, ...]]:
        """What is read of one step while both looks tell of the other one."""
        found = outcomes(writer, reader, self.before)
        return {
            seen
            for seen in found
            for wanted, other in ((OLD, NEW), (NEW, OLD))
            if seen == (Generation(wanted).word, other, Generation(wanted).word)
        }


def test_two_looks_always_tell_whose_data_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Rewritten(monkeypatch)
    assert not case.unseen(case.writer, case.reader)


def test_planted_words_without_any_one_needed_fence_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Rewritten(monkeypatch)
    # The first store's fence orders against the step before; so does the first look's. Loads
    # bring their own, and the last one's orders against nothing.
    for number in range(1, case.writer.count(FENCE)):
        assert case.unseen(without_fence(case.writer, number), case.reader), number
    needed = [
        number
        for number in range(case.reader.count(FENCE))
        if case.unseen(case.writer, without_fence(case.reader, number))
    ]
    assert needed == [1, 2]
