"""Which accesses of a launch are ordered, and which ones meet without an order: a race.

Interpreted programs run one after the other; on a GPU they run at once, and the threads of one
program too. What orders them there is all that counts here:

- `tl.debug_barrier()`, and the broadcast of a single atomic's result: whatever the program did
  before comes before whatever it does after.
- A single atomic that releases publishes what came before the program's last barrier (not what
  came after it: other threads may still be storing). One that acquires, on the same address and
  later, comes after all that was published there. Atomics of scope "cta" and on whole tensors
  order nothing between programs.

Two accesses to one byte race unless they are ordered, or both only read, or both are atomic.
Within a program, what it stored must not be read or stored again before a barrier.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

LOAD, STORE, ATOMIC = "load", "store", "atomic"

Program = tuple[int, ...]

_PAGE_BITS = 16


class Race(AssertionError):
    """Two accesses to one address without an order."""


@dataclass(frozen=True)
class Access:
    """`time` counts the program's barriers and atomics."""

    kind: str
    program: Program
    time: int


State = frozenset[Access]
"""What must be remembered of a byte: its last store, and loads and atomics since."""


class _Clock:
    """What a program knows: of each program, up to which time its accesses are in its past."""

    def __init__(self) -> None:
        self.now = 1
        self.fenced = 0
        """The last time before the last barrier."""
        self.seen: dict[Program, int] = {}

    def barrier(self) -> None:
        self.fenced = self.now
        self.now += 1


class Ordering:
    """The accesses of one launch so far."""

    def __init__(self) -> None:
        self._clocks: defaultdict[Program, _Clock] = defaultdict(_Clock)
        self._published: defaultdict[int, dict[Program, int]] = defaultdict(dict)
        self._pages: dict[int, Any] = {}
        self._states: list[State] = [frozenset()]
        self._numbers: dict[State, int] = {frozenset(): 0}
        self._moves: dict[tuple[int, Access], int] = {}

    def barrier(self, program: Program) -> None:
        """Of all threads of the program."""
        self._clocks[program].barrier()

    def access(self, kind: str, program: Program, addresses: Any, size: int) -> None:
        """Loads, stores or atomics of `size` bytes at each of `addresses` (uint64 [n]).

        Raises:
            Race: naming the two accesses.
        """
        access = Access(kind, program, self._clocks[program].now)
        self._record(access, addresses, size)

    def single_atomic(
        self, program: Program, address: int, size: int, *, acquire: bool, release: bool
    ) -> None:
        """One atomic of a program, whose result all of its threads get.

        Raises:
            Race: naming the two accesses.
        """
        clock = self._clocks[program]
        published = self._published[address]
        if acquire:
            _join(clock.seen, published)
        if release:
            _join(published, {**clock.seen, program: clock.fenced})
        # It is itself part of what it publishes, though its thread's earlier stores may not be.
        time = clock.fenced if release else clock.now
        self._record(Access(ATOMIC, program, time), np.array([address], np.uint64), size)
        clock.barrier()

    def _record(self, access: Access, addresses: Any, size: int) -> None:
        places = (addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel().astype(np.int64)
        pages = places >> _PAGE_BITS
        for page in np.unique(pages).tolist():
            if page not in self._pages:
                self._pages[page] = np.zeros(1 << _PAGE_BITS, np.int32)
            numbers = self._pages[page]
            at = places[pages == page] & ((1 << _PAGE_BITS) - 1)
            distinct, which = np.unique(numbers[at], return_inverse=True)
            after = [self._after(number, access) for number in distinct.tolist()]
            numbers[at] = np.array(after, np.int32)[which]

    def _after(self, number: int, access: Access) -> int:
        """The number of the state that a state becomes; how it becomes it is remembered."""
        move = (number, access)
        if move not in self._moves:
            state = self._states[number]
            for earlier in state:
                self._check(earlier, access)
            if access.kind == STORE:
                state = frozenset([access])  # all that was before it is ordered before it
            else:
                own = {a for a in state if (a.kind, a.program) == (access.kind, access.program)}
                state = state - own | {access}
            if state not in self._numbers:
                self._numbers[state] = len(self._states)
                self._states.append(state)
            self._moves[move] = self._numbers[state]
        return self._moves[move]

    def _check(self, earlier: Access, access: Access) -> None:
        if earlier.kind == access.kind and access.kind in (LOAD, ATOMIC):
            return
        clock = self._clocks[access.program]
        if earlier.program == access.program:
            if earlier.kind != LOAD and earlier.time > clock.fenced:
                raise Race(
                    f"{access.kind}: program {access.program} meets its own {earlier.kind} with "
                    "no tl.debug_barrier() in between"
                )
        elif clock.seen.get(earlier.program, -1) < earlier.time:
            raise Race(
                f"{access.kind}: programs {earlier.program} and {access.program} meet at one "
                f"address, and nothing orders it after the {earlier.kind}"
            )


def _join(clock: dict[Program, int], other: dict[Program, int]) -> None:
    for program, time in other.items():
        clock[program] = max(clock.get(program, -1), time)
