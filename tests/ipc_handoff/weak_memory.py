"""Every outcome of a small program on a processor that reorders (Arm), without one.

`Cells` record what the code under test does to shared memory: its stores, loads and fences in
program order. `outcomes` then lets the stores become visible in every order that the fences
allow, and the loads happen in every order that the fences allow, between them anywhere.
Stores to one place, and loads of one place, keep their order, as they do on every processor.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ipc_handoff import words
from ipc_handoff.words import Words

FENCE = ("fence", "", 0)
Event = tuple[str, str, int]


class Program:
    """Records the shared accesses of the code that runs inside `recording`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modules: tuple[Any, ...] = ()) -> None:
        self.events: list[Event] = []
        self.answers: list[int] = []
        self.answer = 0
        for module in (words, *modules):
            for name in ("fence", "_fence"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda: self.events.append(FENCE))

    def cells(self, name: str, count: int = 1) -> "Cells":
        return Cells(self, name, count)

    def word(self, name: str) -> Words:
        word = Words(memoryview(bytearray(8)))
        cells: Any = self.cells(name)
        word._words = cells
        return word

    def record(self, code: Callable[[], object], answer: int = 0) -> list[Event]:
        """What `code` does, with every load answered alike."""
        self.events, self.answers, self.answer = [], [], answer
        code()
        return self.events

    def replay(self, code: Callable[[], object], answers: list[int]) -> object:
        """Run `code` with its loads answered in turn."""
        self.events, self.answers = [], list(answers)
        return code()

    def load(self, place: str) -> int:
        self.events.append(("load", place, 0))
        return self.answers.pop(0) if self.answers else self.answer


class Cells:
    """Stands for a memoryview of 64-bit words."""

    def __init__(self, program: Program, name: str, count: int, first: int = 0) -> None:
        self.program, self.name, self.count, self.first = program, name, count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            span = range(self.count)[where]
            return Cells(self.program, self.name, len(span), self.first + span.start)
        return self.program.load(f"{self.name}{self.first + where}")

    def __setitem__(self, where: Any, value: Any) -> None:
        span = range(self.count)[where] if isinstance(where, slice) else [where]
        values = value if isinstance(where, slice) else [value]
        for index, item in zip(span, values, strict=True):
            self.program.events.append(("store", f"{self.name}{self.first + index}", item))

    def tolist(self) -> list[int]:
        return [self[index] for index in range(self.count)]


def orders(events: list[Event]) -> Iterator[tuple[int, ...]]:
    """Every order of the accesses (numbered without the fences) that the fences allow."""
    fenced, accesses = 0, []
    for event in events:
        if event == FENCE:
            fenced += 1
        else:
            accesses.append((fenced, event[1]))
    before = [
        {
            earlier
            for earlier in range(index)
            if accesses[earlier][0] < epoch or accesses[earlier][1] == place
        }
        for index, (epoch, place) in enumerate(accesses)
    ]

    def grow(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(accesses):
            yield done
        for index in range(len(accesses)):
            if index not in done and before[index] <= set(done):
                yield from grow((*done, index))

    yield from grow(())


def interleavings(stores: int, loads: int) -> Iterator[tuple[bool, ...]]:
    """True: a store."""
    if not stores and not loads:
        yield ()
    if stores:
        for rest in interleavings(stores - 1, loads):
            yield (True, *rest)
    if loads:
        for rest in interleavings(stores, loads - 1):
            yield (False, *rest)


def outcomes(
    writer: list[Event], reader: list[Event], before: dict[str, int]
) -> set[tuple[int, ...]]:
    """Every combination of values that the reader's loads, in program order, can return."""
    stores = [event for event in writer if event[0] == "store"]
    loads = [event for event in reader if event[0] == "load"]
    found = set()
    weaves = list(interleavings(len(stores), len(loads)))
    load_orders = list(orders([event for event in reader if event[0] != "store"]))
    for store_order in orders([event for event in writer if event[0] != "load"]):
        for load_order in load_orders:
            for weave in weaves:
                memory, seen = dict(before), [0] * len(loads)
                next_store, next_load = iter(store_order), iter(load_order)
                for is_store in weave:
                    if is_store:
                        _, place, value = stores[next(next_store)]
                        memory[place] = value
                    else:
                        index = next(next_load)
                        seen[index] = memory.get(loads[index][1], 0)
                found.add(tuple(seen))
    return found


def without_fence(events: list[Event], number: int) -> list[Event]:
    """The program with its fence `number` taken out."""
    fences = [index for index, event in enumerate(events) if event == FENCE]
    return [event for index, event in enumerate(events) if index != fences[number]]
