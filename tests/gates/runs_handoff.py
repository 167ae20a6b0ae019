"""What is interpreted of the hand-over: both sides in turns, and every end that is none of theirs.

Nobody waits here: words are set before the kernel that looks at them runs, and a wait that would
go on ends at once, by a bound of 0.
"""

from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, SlotLine, StagingWord
from ipc_handoff.generations import Generation
from ipc_handoff.kernels import hand_back as hand_back_module
from ipc_handoff.kernels.done import advance, done
from ipc_handoff.kernels.gate import gate
from ipc_handoff.kernels.hand_back import hand_back
from ipc_handoff.kernels.publish import publish
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.stage import stage
from ipc_handoff.kernels.wait import wait
from ipc_handoff.kernels.words import Decision, Gate, GateEnd, Live, Told, WaitEnd, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.stages import SERVICE_STAGES, WORKER_STAGES, WorkerStage
from tests.gates import watch
from tests.gates.kernels import Run

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=8, top_k=40, page_size=32, max_rows=12, max_requests=6,
    max_context=320, slots=2,
)  # fmt: skip
POISON = -77


@dataclass
class Both:
    """A worker and a service that share a bank, in one process."""

    staging: Tensor
    answers: Tensor
    worker: WorkerMemory
    service: ServiceMemory

    @classmethod
    def attached(cls) -> "Both":
        layout, cpu = GEOMETRY.device, torch.device("cpu")
        # Kernels are interpreted under a watch: these two are what addresses may lead to.
        staging = torch.full((layout.staging_size,), 0xEE, dtype=torch.uint8)
        answers = torch.full((layout.answers_size,), 0xEE, dtype=torch.uint8)
        staging[: layout.staging_slots] = 0
        answers[: layout.answers_slots] = 0
        watch.also_allowed[:] = [staging, answers]
        service = ServiceMemory(GEOMETRY, cpu, staging.data_ptr(), answers.data_ptr())
        worker = WorkerMemory(GEOMETRY, cpu)
        watch.also_allowed += [worker.stamps, worker.order, worker.told, service.closing]
        watch.also_allowed.append(worker.found.entries)
        return cls(staging, answers, worker, service)

    def staged(self, step: int, name: str, dtype: torch.dtype, count: int) -> Tensor:
        layout = GEOMETRY.device
        begin = layout.staging_at(step % GEOMETRY.slots) + getattr(layout, name)
        return self.staging[begin : begin + count * dtype.itemsize].view(dtype)

    def answer(self, step: int) -> Tensor:
        begin = GEOMETRY.device.answers_at(step % GEOMETRY.slots)
        size = GEOMETRY.max_rows * GEOMETRY.top_k * 4
        return self.answers[begin : begin + size].view(torch.int32).view(-1, GEOMETRY.top_k)

    def word(self, of: Tensor, number: int) -> int:
        return int(of[number * DEVICE_LINE :][:8].view(torch.int64))

    def set_generation(self, of: Tensor, slot: int, step: int, layer: int) -> None:
        """As if the slot that begins there held this step's layer."""
        at = slot + SlotLine.LAYER * DEVICE_LINE
        of[at:][:8].view(torch.int64).fill_(Generation(step, layer).word)

    def publish(self, step: int, rows: int = 5, attachment: int = 1) -> None:
        requests = 3
        publish(
            self.worker, starts(requests), lengths(step, requests), table(step, requests),
            step=step, attachment=attachment, staging=self.staging.data_ptr(),
            answers=self.answers.data_ptr(), rows=rows, max_length=300,
        )  # fmt: skip


def starts(requests: int) -> Tensor:
    return torch.arange(requests + 1, dtype=torch.int32) * 2


def lengths(step: int, requests: int) -> Tensor:
    return torch.arange(requests, dtype=torch.int32) + 100 * step


def table(step: int, requests: int) -> Tensor:
    """Narrower than what the lengths can reach."""
    return torch.arange(requests * 4, dtype=torch.int32).view(requests, 4) + 1000 * step


def queries(step: int, layer: int, rows: int) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(100 * step + layer)
    q = torch.randint(0, 256, (rows, GEOMETRY.heads * GEOMETRY.head_dim), generator=seed)
    return q.to(torch.uint8), torch.randn(rows, GEOMETRY.heads, generator=seed)


def indices(step: int, layer: int) -> Tensor:
    count = GEOMETRY.max_rows * GEOMETRY.top_k
    return torch.arange(count, dtype=torch.int32).view(-1, GEOMETRY.top_k) + 1000 * step + layer


def receive(both: Both, out: Tensor, ordinal: int, together: bool) -> None:
    if together:
        wait(both.worker, ordinal=ordinal, bound=0, out=out)
    else:
        wait(both.worker, ordinal=ordinal, bound=0)
        hand_back(both.worker, out, ordinal=ordinal)


def decided(both: Both) -> list[int]:
    return [int(both.worker.decision[name]) for name in Decision]


def answered_steps(together: bool) -> None:
    both = Both.attached()
    for step in (11, 12, 13):
        # A captured batch of 7 rows, of which the step has 5; one alone is handed back by the wait.
        rows, captured = (1, 1) if together else (5, 7)
        both.publish(step, rows)
        both.service.step.fill_(step)
        gate(both.service, Gate.PUBLISHED, slot=step % GEOMETRY.slots, bound=0)
        assert both.staged(step, "seq_lens", torch.int32, 3).equal(lengths(step, 3))
        assert both.staged(step, "query_start", torch.int32, 4).equal(starts(3))
        pages = both.staged(step, "block_table", torch.int32, 3 * GEOMETRY.table_width)
        pages = pages.view(3, -1)
        assert pages[:, :4].equal(table(step, 3)) and (pages[:, 4:] == -1).all()
        for ordinal in range(2):
            q, weights = queries(step, ordinal, captured)
            stage(both.worker, q, weights, ordinal=ordinal, first=ordinal == 0)
            assert int(both.worker.detached) == 0
            kind = Gate.LAYER if ordinal else Gate.FIRST_LAYER
            gate(both.service, kind, slot=step % GEOMETRY.slots, ordinal=ordinal, bound=0)
            assert int(both.service.enabled) == 1
            assert both.staged(step, "q", torch.uint8, q[:rows].numel()).equal(q[:rows].flatten())
            staged = both.staged(step, "weights", torch.float32, weights[:rows].numel())
            assert staged.equal(weights[:rows].flatten())
            both.answer(step).copy_(indices(step, ordinal))
            advance(both.service)
            done(both.service, ordinal, step % GEOMETRY.slots)
            out = torch.full((captured, GEOMETRY.top_k), POISON, dtype=torch.int32)
            receive(both, out, ordinal, together)
            assert out[:rows].equal(indices(step, ordinal)[:rows])
            assert (out[rows:] == -1).all()
            assert decided(both) == [0, 1, 0, 0]
        assert int(both.service.live[Live.ANSWERED]) == 2
        generation = both.worker.stamps.view(-1, 1 + 2 * len(WORKER_STAGES))[step % 64, 0]
        assert int(generation) == step
        at = GEOMETRY.device.stamps + step % 64 * GEOMETRY.device.stamp_stride
        assert both.word(both.answers[at:], 0) == step
    assert both.word(both.answers, AnswersWord.PROGRESS) == 3 * 2 * 2
    assert int(both.worker.state[WorkerState.ANSWERED]) == 6


def forwards_without_a_publication() -> None:
    """A capture before any step, and a second forward after one publication."""
    both = Both.attached()
    out = torch.full((4, GEOMETRY.top_k), POISON, dtype=torch.int32)

    def inline() -> None:
        for ordinal in range(2):
            stage(both.worker, *queries(1, ordinal, 4), ordinal=ordinal, first=ordinal == 0)
            assert int(both.worker.detached) == 1
            receive(both, out[:1] if ordinal else out, ordinal, together=ordinal == 1)
            assert decided(both) == [1, 0, 0, 1]

    inline()
    both.publish(21, rows=4)
    stage(both.worker, *queries(21, 0, 4), ordinal=0, first=True)
    assert int(both.worker.detached) == 0
    before = both.word(both.staging, StagingWord.REQUESTS)
    assert before == 21
    # The bank may be gone by then.
    both.worker.state[WorkerState.ANSWER_SLOT] = 1
    inline()
    assert both.word(both.staging, StagingWord.REQUESTS) == before
    assert (out == POISON).all()


def many_rows_handed_back() -> None:
    """Programs take several: the last one has fewer, and rows behind the step's get -1."""
    both = Both.attached()
    both.publish(15, rows=9)
    answer = both.answer(15)
    answer.copy_(indices(15, 0))
    both.set_generation(both.answers, GEOMETRY.device.answers_at(15 % GEOMETRY.slots), 15, 0)
    both.worker.state[WorkerState.CURRENT] = 15
    both.worker.decision[Decision.ANSWERED] = 1
    room = torch.full((12, GEOMETRY.top_k), POISON, dtype=torch.int32)
    with patch.dict(hand_back_module._TOGETHER, {1: 4}):
        hand_back(both.worker, room[:11], ordinal=0)
    assert room[:9].equal(answer[:9])
    assert (room[9:11] == -1).all() and (room[11] == POISON).all()


def begun(step: int) -> Both:
    both = Both.attached()
    both.publish(step)
    stage(both.worker, *queries(step, 0, 5), ordinal=0, first=True)
    return both


def end_of_wait(both: Both, together: bool = False) -> list[int]:
    out = torch.full((1 if together else 5, GEOMETRY.top_k), POISON, dtype=torch.int32)
    both.worker.stamps.fill_(POISON)
    receive(both, out, 0, together)
    assert (out == POISON).all()
    # No time passes here: what is stamped is 0. No stage that has begun is left without an end.
    assert (both.worker.stamps == 0).nonzero()[:, 1].tolist() == [
        1 + stage for stage in (WorkerStage.WAIT_ENDED, WorkerStage.HANDED_BACK)
    ]
    return decided(both)


def cancelled_step(word: int) -> None:
    both = begun(31)
    both.answers[AnswersWord.CANCELLED * DEVICE_LINE :][:8].view(torch.int64).fill_(word)
    assert end_of_wait(both) == [1, 0, 1, 1]
    stage(both.worker, *queries(31, 1, 5), ordinal=1, first=False)
    assert int(both.worker.detached) == 1
    assert both.word(both.staging, StagingWord.DETACHED) == 0
    assert int(both.worker.told[Told.CANCELLED]) == 1 and int(both.worker.told[Told.LOST]) == 0
    both.publish(32)
    assert both.word(both.staging, StagingWord.PUBLISHED) == 32


def stalled_wait(together: bool) -> None:
    both = begun(41)
    # The answer of another step, and of another layer of this one.
    both.answers[AnswersWord.DONES * DEVICE_LINE :][:8].view(torch.int64).fill_(40)
    both.answers[(AnswersWord.DONES + 1) * DEVICE_LINE :][:8].view(torch.int64).fill_(41)
    assert end_of_wait(both, together) == [1, 0, 1, 1]
    told = both.worker.told
    assert [int(told[name]) for name in (Told.LOST, Told.STEP, Told.LAYER)] == [1, 41, 0]
    assert int(told[Told.END]) == WaitEnd.STALLED
    assert both.word(both.staging, StagingWord.DETACHED) == 1
    # Nothing is published for an attachment that is over; for the next one it is.
    both.publish(42)
    assert both.word(both.staging, StagingWord.PUBLISHED) == 41
    stage(both.worker, *queries(42, 0, 5), ordinal=0, first=True)
    assert int(both.worker.detached) == 1
    both.publish(43, attachment=2)
    stage(both.worker, *queries(43, 0, 5), ordinal=0, first=True)
    assert int(both.worker.detached) == 0


def aborted_wait() -> None:
    both = begun(51)
    both.worker.order.fill_(1)
    out = torch.full((5, GEOMETRY.top_k), POISON, dtype=torch.int32)
    wait(both.worker, ordinal=0, bound=10**9)
    hand_back(both.worker, out, ordinal=0)
    assert (out == POISON).all()
    assert int(both.worker.told[Told.END]) == WaitEnd.ABORTED


def gate_ends(kind: Gate, expected: GateEnd) -> None:
    both, slot = Both.attached(), 61 % GEOMETRY.slots
    both.publish(61)
    both.service.step.fill_(61)
    gate(both.service, Gate.PUBLISHED, slot=slot, bound=0)
    bound = 10**9
    if expected == GateEnd.LATE:
        bound = 0
    elif expected == GateEnd.NEWER:
        both.publish(62)
    elif expected == GateEnd.DETACHED:
        both.staging[StagingWord.DETACHED * DEVICE_LINE :][:8].view(torch.int64).fill_(1)
    elif expected == GateEnd.CLOSING:
        both.service.closing.fill_(1)
    if kind == Gate.FIRST_LAYER and expected == GateEnd.NEWER:
        # The layer itself is there: only the copies of lengths and tables cannot be trusted.
        both.staging[StagingWord.REQUESTS * DEVICE_LINE :][:8].view(torch.int64).fill_(61)
    if kind == Gate.PUBLISHED:
        both.service.step.fill_(60 if expected == GateEnd.NEWER else 70)
    gate(both.service, kind, slot=slot, ordinal=0, bound=bound)
    assert int(both.service.enabled) == 0
    assert int(both.service.live[Live.REASON]) == expected
    assert both.word(both.answers, AnswersWord.CANCELLED) == int(both.service.step)
    # Nothing more of the step is gated, written or rung, also if the worker comes after all.
    both.staging[(StagingWord.REQUESTS + 1) * DEVICE_LINE :][:8].view(torch.int64).fill_(61)
    gate(both.service, Gate.LAYER, slot=slot, ordinal=1, bound=bound)
    assert int(both.service.enabled) == 0
    progress = both.word(both.answers, AnswersWord.PROGRESS)
    done(both.service, 1, slot)
    advance(both.service)
    assert both.word(both.answers, AnswersWord.DONES + 1) == 0
    assert both.word(both.answers, AnswersWord.PROGRESS) == progress


def stamps_of_another_step_are_taken_away() -> None:
    both = Both.attached()
    for step in (5, 5 + 64):
        both.publish(step)
        both.service.step.fill_(step)
        gate(both.service, Gate.PUBLISHED, slot=step % GEOMETRY.slots, bound=0)
        at = GEOMETRY.device.stamps + 5 * GEOMETRY.device.stamp_stride
        cells = both.answers[at:][: 8 * (1 + 2 * len(SERVICE_STAGES))].view(torch.int64)
        assert int(cells[0]) == step and (cells[1:] == 0).all()
        cells[1:] = 9


_CASES = {
    "answered steps": partial(answered_steps, False),
    "answered steps, handed back by the wait": partial(answered_steps, True),
    "many rows handed back": many_rows_handed_back,
    "forwards without a publication": forwards_without_a_publication,
    "a cancelled step": partial(cancelled_step, 31),
    "a cancelled step, and the next one too": partial(cancelled_step, 32),
    "a stalled wait": partial(stalled_wait, False),
    "a stalled wait that would hand back": partial(stalled_wait, True),
    "an aborted wait": aborted_wait,
    "stamps of another step": stamps_of_another_step_are_taken_away,
} | {
    f"gate {kind.name} ends: {end.name}": partial(gate_ends, kind, end)
    for kind in Gate
    for end in (GateEnd.LATE, GateEnd.NEWER, GateEnd.DETACHED, GateEnd.CLOSING)
}  # fmt: skip

RUNS = [Run(f"hand-over, {name}", check) for name, check in _CASES.items()]
