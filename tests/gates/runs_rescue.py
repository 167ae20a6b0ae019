"""What is interpreted of the rescue behind a wait: what select_paged selects, or nothing.

And of the same with the hand-back, in one launch: the answer, what is selected, or nothing.
"""

from functools import partial

import torch

from attention_worker.answer_or_rescue import answer_or_rescue
from indexer_service.kernels import indexer
from indexer_service.kernels.indexer.rescue import RescueInputs, rescue
from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.words import Decision, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from tests.gates import watch
from tests.gates.kernels import Run
from tests.kernels import inputs


def _same(lengths: list[int], next_n: int, heads: int, k: int) -> None:
    case = inputs.paged(lengths, next_n=next_n, heads=heads, dim=64, page=64)
    expected = torch.full((len(lengths) * next_n, k), 77, dtype=torch.int32)
    indexer.select_paged(*case.tensors, k, out=expected, impl="triton")
    on, off = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out = torch.full_like(expected, 78)
    rescue(RescueInputs(*case.tensors, k, out, off))
    assert (out == 78).all()
    rescue(RescueInputs(*case.tensors, k, out, on))
    assert torch.equal(out, expected)


def _answer_or_rescue(lengths: list[int], next_n: int, step_rows: int) -> None:
    """step_rows: the step has so many; the batch that was captured has more."""
    case = inputs.paged(lengths, next_n=next_n, heads=16, dim=64, page=64)
    rows, k = len(lengths) * next_n, 40
    geometry = HandoffGeometry(
        layers=(0,), heads=16, head_dim=64, top_k=k, page_size=64, max_rows=rows,
        max_requests=len(lengths), max_context=640, slots=2,
    )  # fmt: skip
    memory = WorkerMemory(geometry, torch.device("cpu"))
    # In front of a slot stands whose answer it holds.
    slot = torch.zeros(_LINE + rows * k, dtype=torch.int32)
    slot.view(torch.int64)[0] = Generation(3, 0).word
    answer = slot[_LINE:].view(rows, k)
    answer.copy_(torch.arange(rows * k, dtype=torch.int32).view(rows, k))
    watch.also_allowed[:] = [slot, memory.stamps, memory.found.entries]
    state = memory.state
    state[WorkerState.STAMPS] = memory.stamps.data_ptr()

    def behind_a_wait(decision: Decision | None) -> torch.Tensor:
        memory.decision.zero_()
        if decision is not None:
            memory.decision[decision] = 1
        out = torch.full((rows, k), 78, dtype=torch.int32)
        given = RescueInputs(*case.tensors, k, out, memory.rescued)
        answer_or_rescue(memory, given, ordinal=0)
        return out

    # No step is under way, and the bank of the last one is gone.
    state[WorkerState.ROWS], state[WorkerState.ANSWER_SLOT] = rows, 1
    assert (behind_a_wait(None) == 78).all()
    state[WorkerState.CURRENT], state[WorkerState.ROWS] = 3, step_rows
    state[WorkerState.ANSWER_SLOT] = answer.data_ptr()
    out = behind_a_wait(Decision.ANSWERED)
    assert torch.equal(out[:step_rows], answer[:step_rows]) and (out[step_rows:] == -1).all()
    expected = torch.full((rows, k), 77, dtype=torch.int32)
    indexer.select_paged(*case.tensors, k, out=expected, impl="triton")
    assert torch.equal(behind_a_wait(Decision.RESCUED), expected)


_LINE = DEVICE_LINE // 4
_CASES = {
    "a row a request": partial(_same, [300, 0, 33, 512, 1], 1, 16, 40),
    "three rows a request": partial(_same, [130, 2, 0], 3, 16, 40),
    "more indices than keys": partial(_same, [90], 2, 64, 128),
}

_BOTH = {
    "a row a request": partial(_answer_or_rescue, [300, 0, 33], 1, 3),
    "two rows a request, padded": partial(_answer_or_rescue, [130, 2, 0], 2, 4),
}

RUNS = [Run(f"rescue, {name}", check) for name, check in _CASES.items()]
RUNS += [Run(f"answer or rescue, {name}", check) for name, check in _BOTH.items()]
