"""What is interpreted of a bell that top-k's last program rings: one bell, behind all rows."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.topk import launch, reference
from indexer_service.kernels.topk.plan import Plan
from ipc_handoff.device_layout import AnswersWord
from ipc_handoff.kernels import done
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.words import Gate, Live
from tests.gates import watch
from tests.gates.kernels import Run
from tests.gates.runs_handoff import GEOMETRY, POISON, Both
from tests.gates.runs_topk import GROUPS, SIZES

STEP = 9


def _told(lengths: list[int], splits: int, *, elsewhere: tuple[int, ...] = ()) -> None:
    """elsewhere: rows that another window holds."""
    both, rows = _live(), len(lengths)
    answer = both.answer(STEP)[:rows]
    answer.fill_(POISON)
    seen: list[tuple[int, torch.Tensor]] = []

    def ring(address: Any, *arguments: Any) -> None:
        seen.append((int(address.handle.data[0]), answer.clone()))
        real(address, *arguments)

    real = done.ring
    with patch.object(done, "ring", ring):
        expected = _select(both, lengths, splits, elsewhere)
    assert len(seen) == 2, f"{len(seen)} bells instead of two: the layer's, then progress"
    address, then = seen[0]
    bell = AnswersWord.DONES + 1
    assert address == both.service.answers + bell * 128
    assert torch.equal(then, expected), "rung before all rows were written"
    assert both.word(both.answers, bell) == STEP
    assert both.word(both.answers, AnswersWord.PROGRESS) == 1
    assert int(both.service.live[Live.ANSWERED]) == 1
    assert int(both.service.arrived) == 0


def _given_up() -> None:
    """Nothing is rung, and nothing is counted that the next call would find."""
    both = _live()
    both.service.live[Live.LIVE] = 0
    both.answer(STEP).fill_(POISON)
    _select(both, [100, 30, 7], 1, ())
    assert (both.answer(STEP) == POISON).all()
    assert both.word(both.answers, AnswersWord.DONES + 1) == 0
    assert both.word(both.answers, AnswersWord.PROGRESS) == 0
    assert int(both.service.arrived) == 0


def _where_registers_are_short() -> None:
    """Then it is done by a launch of its own, behind top-k's."""
    scores = torch.randn((2, 128), generator=torch.Generator().manual_seed(4))
    ends = torch.tensor([100, 7], dtype=torch.int32)
    out, expected = torch.full((2, 40), POISON, dtype=torch.int32), torch.empty((2, 40)).int()
    then: list[torch.Tensor] = []
    epilogue = Epilogue(done.tell_layer, (), lambda: then.append(out.clone()))
    with patch.object(launch.planning, "SHORT_OF_REGISTERS", 0):
        launch.select_packed(
            scores.flatten(), torch.tensor([0, 128]), ends, torch.zeros(2, dtype=torch.int32), 40,
            out, longest=128, epilogue=epilogue,
        )  # fmt: skip
    reference.select(scores, 40, None, ends, expected)
    assert len(then) == 1 and torch.equal(then[0], expected)


def _live() -> Both:
    """A service whose step has begun."""
    both = Both.attached()
    both.publish(STEP)
    both.service.step.fill_(STEP)
    slot = STEP % GEOMETRY.slots
    gate(both.service, Gate.PUBLISHED, slot=slot, bound=0)
    both.set_generation(both.staging, GEOMETRY.device.staging_at(slot), STEP, 1)
    service = both.service
    watch.also_allowed += [service.step, service.live, service.progress, service.arrived]
    return both


def _select(
    both: Both, lengths: list[int], splits: int, elsewhere: tuple[int, ...]
) -> torch.Tensor:
    """What the answer must be."""
    rows, k = len(lengths), GEOMETRY.top_k
    scores = torch.randn((rows, 512), generator=torch.Generator().manual_seed(rows))
    ends = torch.tensor(lengths, dtype=torch.int32)
    at = torch.arange(rows) * 512
    at[list(elsewhere)] = -1
    launch.run(
        Plan(SIZES, splits, rows if splits > 1 else min(rows, 2), GROUPS), scores.flatten(), k,
        both.answer(STEP)[:rows], row_at=at, row_end=ends,
        arrived=torch.zeros(rows, dtype=torch.int32), enabled=both.service.enabled,
        epilogue=Epilogue(
            done.tell_layer, done.telling(both.service, 1, STEP % GEOMETRY.slots), lambda: None
        ),
    )  # fmt: skip
    expected = torch.empty((rows, k), dtype=torch.int32)
    reference.select(scores, k, None, ends, expected)
    expected[list(elsewhere)] = POISON
    return expected


_CASES = {
    "one row": partial(_told, [100], 1),
    "one row, shared": partial(_told, [400], 3),
    "rows in turns": partial(_told, [100, 30, 7, 0, 120], 1),
    "rows that are shared": partial(_told, [400, 30, 0, 300], 3),
    "a row of another window": partial(_told, [400, 30, 300], 3, elsewhere=(0, 1)),
    "a row of another window, in turns": partial(_told, [100, 30, 7], 1, elsewhere=(2,)),
    "a step that was given up": _given_up,
    "where registers are short": _where_registers_are_short,
}

RUNS = [Run(f"told by top-k, {name}", check) for name, check in _CASES.items()]
