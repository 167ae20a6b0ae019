"""What is interpreted of generations: who reads a slot with another's data sees it, and says so.

Each case is a race that is made by hand between two launches of a step that is right otherwise.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from indexer_service.kernels import device_inputs
from indexer_service.kernels.indexer import rescue
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, SlotLine
from ipc_handoff.generations import Generation
from ipc_handoff.kernels import hand_back as hand_back_module
from ipc_handoff.kernels.done import done
from ipc_handoff.kernels.found import ENTRIES, Contradiction, Entry
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.hand_back import hand_back
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.share import share
from ipc_handoff.kernels.stage import stage
from ipc_handoff.kernels.wait import wait
from ipc_handoff.kernels.words import Decision, Gate, GateEnd, Live, WorkerState
from tests.gates import watch
from tests.gates.kernels import Run
from tests.gates.runs_handoff import GEOMETRY, POISON, Both, indices, queries

STEP, SLOT = 9, 9 % GEOMETRY.slots


def _word(both: Both, of: Tensor, line: SlotLine) -> Tensor:
    layout = GEOMETRY.device
    slot = layout.staging_at(SLOT) if of is both.staging else layout.answers_at(SLOT)
    return of[slot + line * DEVICE_LINE :][:8].view(torch.int64)


def _gated(kind: Gate, *, checked: bool = True) -> Both:
    """A service behind the gates before this one, and the first layer staged."""
    both = Both.attached()
    if not checked:
        both.service = ServiceMemory(
            GEOMETRY, both.service.device, both.service.staging, both.service.answers,
            checks_generations=False,
        )  # fmt: skip
        watch.also_allowed.append(both.service.closing)
    both.service.step.fill_(STEP)
    both.publish(STEP)
    if kind != Gate.PUBLISHED:
        gate(both.service, Gate.PUBLISHED, slot=SLOT, bound=0)
        stage(both.worker, *queries(STEP, 0, 5), ordinal=0, first=True)
    if kind == Gate.LAYER:
        gate(both.service, Gate.FIRST_LAYER, slot=SLOT, ordinal=0, bound=0)
        done(both.service, 0, SLOT)
        stage(both.worker, *queries(STEP, 1, 5), ordinal=1, first=False)
    return both


def _pass(both: Both, kind: Gate) -> None:
    gate(both.service, kind, slot=SLOT, ordinal=int(kind == Gate.LAYER), bound=0)


def _seen(both: Both) -> Generation:
    return Generation.of(int(both.service.live[Live.SEEN : Live.SEEN + 2].view(torch.int64)))


def gate_sees(kind: Gate, line: SlotLine, found: Generation, end: GateEnd) -> None:
    both = _gated(kind)
    _word(both, both.staging, line).fill_(found.word)
    _pass(both, kind)
    assert int(both.service.enabled) == 0
    assert int(both.service.live[Live.REASON]) == end
    assert _seen(both) == found
    assert both.word(both.answers, AnswersWord.CANCELLED) == STEP


def gate_passes(kind: Gate, *, checked: bool) -> None:
    """The slot's words are right, or nobody looks at them."""
    both = _gated(kind, checked=checked)
    if not checked:
        _word(both, both.staging, SlotLine.LAYER).fill_(1)
        _word(both, both.staging, SlotLine.INPUTS).fill_(1)
    _pass(both, kind)
    assert int(both.service.enabled) == 1
    assert both.word(both.answers, AnswersWord.CANCELLED) == 0
    if kind != Gate.PUBLISHED:
        ordinal = int(kind == Gate.LAYER)
        answer = Generation.of(int(_word(both, both.answers, SlotLine.LAYER)))
        assert answer == Generation(STEP, ordinal, is_written=False)
        done(both.service, ordinal, SLOT)
        answer = Generation.of(int(_word(both, both.answers, SlotLine.LAYER)))
        assert answer == Generation(STEP, ordinal)


def overwritten_while_it_is_scored() -> None:
    both = _gated(Gate.FIRST_LAYER)
    _pass(both, Gate.FIRST_LAYER)
    later = Generation(STEP + GEOMETRY.slots, 0, is_written=False)
    _word(both, both.staging, SlotLine.LAYER).fill_(later.word)
    done(both.service, 0, SLOT)
    assert both.word(both.answers, AnswersWord.DONES) == 0
    assert both.word(both.answers, AnswersWord.CANCELLED) == STEP
    assert both.word(both.answers, AnswersWord.PROGRESS) == 0
    assert int(both.service.enabled) == 0
    assert int(both.service.live[Live.REASON]) == GateEnd.RACED_LAYER
    assert int(both.service.live[Live.ANSWERED]) == 0
    assert _seen(both) == later
    assert int(both.service.arrived) == 0


def _answered(rows: int) -> tuple[Both, Tensor]:
    """A worker whose first layer is answered."""
    both = Both.attached()
    both.publish(STEP, rows)
    both.service.step.fill_(STEP)
    gate(both.service, Gate.PUBLISHED, slot=SLOT, bound=0)
    stage(both.worker, *queries(STEP, 0, rows), ordinal=0, first=True)
    gate(both.service, Gate.FIRST_LAYER, slot=SLOT, ordinal=0, bound=0)
    both.answer(STEP).copy_(indices(STEP, 0))
    done(both.service, 0, SLOT)
    return both, torch.full((rows, GEOMETRY.top_k), POISON, dtype=torch.int32)


def stale_answer(together: bool, found: Generation) -> None:
    """The bell is right, the slot is not: this layer and those behind it are computed inline."""
    both, out = _answered(1 if together else 5)
    _word(both, both.answers, SlotLine.LAYER).fill_(found.word)
    wait(both.worker, ordinal=0, bound=0, out=out if together else None)
    assert (out == POISON).all()
    assert [int(both.worker.decision[name]) for name in Decision] == [1, 0, 1, 1]
    wanted = Generation(STEP, 0).word
    (entry,) = both.worker.found.new()
    assert entry == Entry(Contradiction.STALE_ANSWER, STEP, 0, -1, -1, wanted, found.word)
    stage(both.worker, *queries(STEP, 1, len(out)), ordinal=1, first=False)
    assert int(both.worker.detached) == 1


def overwritten_answer() -> None:
    """Behind the wait another answer comes over it: its rows are nobody's."""
    both, out = _answered(5)
    wait(both.worker, ordinal=0, bound=0)
    found = Generation(STEP + GEOMETRY.slots, 0, is_written=False)
    _word(both, both.answers, SlotLine.LAYER).fill_(found.word)
    hand_back(both.worker, out, ordinal=0)
    assert (out == -1).all()
    entries = list(both.worker.found.new())
    wanted = Generation(STEP, 0).word
    assert entries == [
        Entry(Contradiction.OVERWRITTEN_ANSWER, STEP, 0, row, -1, wanted, found.word)
        for row in range(5)
    ]
    assert not list(both.worker.found.new())


def many_overwritten() -> None:
    """More than there are places: the newest are told, the others are counted."""
    both, out = _answered(5)
    wait(both.worker, ordinal=0, bound=0)
    _word(both, both.answers, SlotLine.LAYER).fill_(0)
    found = both.worker.found
    found.count.fill_(ENTRIES)  # All places are taken,
    found.entries[:, 0] = torch.arange(1, ENTRIES + 1)
    hand_back(both.worker, out, ordinal=0)  # and some once more.
    told = list(found.new())
    assert found.lost == 5
    assert len(told) == ENTRIES and [entry.row for entry in told[-5:]] == [0, 1, 2, 3, 4]


def an_entry_for_each_program() -> None:
    """Of a GPU that is full of programs which tell, no two write the same entry."""
    fewest = min(device_inputs._WARPS, hand_back_module._WARPS, rescue._WARPS)
    assert _PROCESSORS * _WARPS_A_PROCESSOR // fewest <= ENTRIES


_PROCESSORS, _WARPS_A_PROCESSOR = 160, 64
"""The most that a GPU has (148 on SM100, 132 on SM90)."""


def shared_indices(leaks: bool) -> None:
    both, out = _answered(5)
    both.worker.begun.fill_(STEP)
    wait(both.worker, ordinal=0, bound=0)
    hand_back(both.worker, out, ordinal=0)
    assert int(both.worker.state[WorkerState.SELECTED]) == STEP
    if leaks:
        both.worker.begun.fill_(STEP + 1)  # of which no layer has selected
    share(both.worker, out, ordinal=1)
    told = list(both.worker.found.new())
    if leaks:
        assert (out == -1).all()
        leak = Contradiction.SHARED_INDEX_LEAK
        assert told == [Entry(leak, STEP + 1, 1, -1, -1, STEP + 1, STEP)]
    else:
        assert out.equal(indices(STEP, 0)[:5]) and not told


_BEFORE, _AFTER = Generation(STEP - GEOMETRY.slots), Generation(STEP + GEOMETRY.slots)
_OTHER = Generation(STEP, 1)
_BEGUN = Generation(STEP, 0, is_written=False)
_INPUTS, _LAYER = SlotLine.INPUTS, SlotLine.LAYER
_RACED_INPUTS, _RACED_LAYER = GateEnd.RACED_INPUTS, GateEnd.RACED_LAYER

_CASES: dict[str, Callable[[], None]] = {
    f"gate {kind.name}, {line.name.lower()} of {found}": partial(gate_sees, kind, line, found, end)
    for kind, line, found, end in (
        (Gate.PUBLISHED, _INPUTS, _BEFORE, _RACED_INPUTS),
        (Gate.PUBLISHED, _INPUTS, _BEGUN, _RACED_INPUTS),
        (Gate.FIRST_LAYER, _INPUTS, _AFTER, _RACED_INPUTS),
        (Gate.FIRST_LAYER, _LAYER, _BEGUN, _RACED_LAYER),
        (Gate.LAYER, _LAYER, Generation(STEP, 0), _RACED_LAYER),
        (Gate.LAYER, _LAYER, _AFTER, _RACED_LAYER),
    )
} | {
    f"gate {kind.name} passes, checked {checked}": partial(gate_passes, kind, checked=checked)
    for kind in Gate
    for checked in (False, True)
} | {
    "q overwritten while it is scored": overwritten_while_it_is_scored,
    "a stale answer": partial(stale_answer, False, _BEFORE),
    "another layer's answer": partial(stale_answer, False, _OTHER),
    "a stale answer that would be handed back": partial(stale_answer, True, _BEGUN),
    "an overwritten answer": overwritten_answer,
    "many overwritten answers": many_overwritten,
    "an entry for each program": an_entry_for_each_program,
    "shared indices": partial(shared_indices, False),
    "shared indices of another step": partial(shared_indices, True),
}  # fmt: skip

RUNS = [Run(f"generations, {name}", check) for name, check in _CASES.items()]
