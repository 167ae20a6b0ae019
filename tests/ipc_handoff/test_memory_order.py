"""Words and stamps on weakly ordered processors: every outcome, and every fence needed."""

from typing import Any

import pytest

from ipc_handoff import stamps, words
from ipc_handoff.stamps import StampRing
from tests.ipc_handoff.weak_memory import FENCE, Event, Program, outcomes, without_fence


class Announced:
    """Data stored before a word, and read after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = Program(monkeypatch)
        self.word, self.data = self.program.word("word"), self.program.cells("data")
        self.writer = self.program.record(self.write)
        self.reader = self.program.record(self.read)

    def write(self) -> None:
        self.data[0] = 7
        self.word.store(1)

    def read(self) -> tuple[int, int]:
        return self.word.load(), self.data[0]

    def wrong(self, writer: list[Event], reader: list[Event]) -> set[tuple[int, ...]]:
        return {seen for seen in outcomes(writer, reader, {}) if seen == (1, 0)}


def test_a_word_announces_what_was_stored_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Announced(monkeypatch)
    assert case.writer == [("store", "data0", 7), FENCE, ("store", "word0", 1)]
    assert case.reader == [("load", "word0", 0), FENCE, ("load", "data0", 0)]
    assert case.wrong(case.writer, case.reader) == set()


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_planted_word_without_fence_announces_data_that_is_not_there(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Announced(monkeypatch)
    if side == "writer":
        assert case.wrong(without_fence(case.writer, 0), case.reader) != set()
    else:
        assert case.wrong(case.writer, without_fence(case.reader, 0)) != set()


OLD, NEW, STEPS = 5, 6, 1


class Stamped:
    """The block of step 5 is taken for step 6 and stamped while a reader asks for either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = Program(monkeypatch, (stamps,))
        self.ring = StampRing(memoryview(bytearray(64)), 1, 2)
        broken: Any = self.ring
        broken._generations = [self.program.word("generation")]
        broken._bodies = [self.program.cells("cell", 2)]
        broken._blank = [0, 0]
        self.before = {"generation0": OLD, "cell0": 51, "cell1": 52}
        self.writer = self.program.record(self.write)
        self.reader = self.program.record(lambda: self.ring.read(NEW), answer=NEW)

    def write(self) -> None:
        self.ring.begin(NEW)
        self.ring.stamp(NEW, 0, 0, 61)
        self.ring.stamp(NEW, 0, 1, 62)

    def shown(self, writer: list[Event], reader: list[Event], step: int) -> set[tuple[int, ...]]:
        """Every row of stamps that a reader of `step` can be given."""
        rows = set()
        for seen in outcomes(writer, reader, self.before):
            answer: Any = self.program.replay(lambda: self.ring.read(step), list(seen))
            if answer is not None:
                rows.add(tuple(answer[0]))
        return rows

    def wrong(self, writer: list[Event], reader: list[Event]) -> set[tuple[int, ...]]:
        old = self.shown(writer, reader, OLD) - {(51, 52)}
        new = self.shown(writer, reader, NEW) - {(0, 0), (61, 0), (0, 62), (61, 62)}
        return old | new


def test_stamps_of_one_step_are_never_shown_as_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Stamped(monkeypatch)
    assert case.shown(case.writer, case.reader, OLD) == {(51, 52)}
    assert (61, 62) in case.shown(case.writer, case.reader, NEW)
    assert case.wrong(case.writer, case.reader) == set()


def fences(events: list[Event]) -> int:
    return events.count(FENCE)


def test_planted_stamps_without_any_one_needed_fence_are_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Stamped(monkeypatch)
    # The first store's fence orders against the step before, the last load's against nothing.
    for number in range(1, fences(case.writer)):
        assert case.wrong(without_fence(case.writer, number), case.reader), number
    for number in range(fences(case.reader) - 1):
        assert case.wrong(case.writer, without_fence(case.reader, number)), number


def test_planted_stamps_without_blanking_or_second_look_are_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Stamped(monkeypatch)
    no_reset = [e for e in case.writer if e != ("store", "generation0", 0)]
    assert case.wrong(no_reset, case.reader)
    no_blank = [e for e in case.writer if not (e[1].startswith("cell") and e[2] == 0)]
    assert case.wrong(no_blank, case.reader)


def test_the_fence_is_real_where_the_processor_does_not_keep_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []

    class Lock:
        def __enter__(self) -> None:
            taken.append("lock")

        def __exit__(self, *_: object) -> None:
            taken.append("unlock")

    monkeypatch.setattr(words, "_fence_lock", Lock())
    monkeypatch.setattr(words, "_KEEPS_ORDER", True)
    words.fence()
    assert taken == []
    monkeypatch.setattr(words, "_KEEPS_ORDER", False)
    words.fence()
    assert taken == ["lock", "unlock"] * 2
