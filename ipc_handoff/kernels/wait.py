"""The worker waits for one layer's answer, within a bound, and decides for all kernels behind."""

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import (
    first_thread,
    generation,
    held,
    int32_at,
    line,
    look,
    nanoseconds,
    ring,
    stamp,
)
from ipc_handoff.device_layout import AnswersWord, SlotLine, StagingWord
from ipc_handoff.kernels.found import Contradiction, tell_found
from ipc_handoff.kernels.launch import INDEX_BYTES, dependent_launch, together
from ipc_handoff.kernels.words import Decision, Told, WaitEnd, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WorkerStage

CURRENT = tl.constexpr(int(WorkerState.CURRENT))
STAGING = tl.constexpr(int(WorkerState.STAGING))
ANSWERS = tl.constexpr(int(WorkerState.ANSWERS))
STAMPS = tl.constexpr(int(WorkerState.STAMPS))
STEP_ROWS = tl.constexpr(int(WorkerState.ROWS))
ANSWER_SLOT = tl.constexpr(int(WorkerState.ANSWER_SLOT))
ATTACHMENT = tl.constexpr(int(WorkerState.ATTACHMENT))
LOST = tl.constexpr(int(WorkerState.LOST))
LAYERS_ANSWERED = tl.constexpr(int(WorkerState.ANSWERED))
LAYERS_INLINE = tl.constexpr(int(WorkerState.INLINE))
IS_DETACHED = tl.constexpr(int(Decision.DETACHED))
IS_ANSWERED = tl.constexpr(int(Decision.ANSWERED))
IS_RESCUED = tl.constexpr(int(Decision.RESCUED))
IS_INLINE = tl.constexpr(int(Decision.INLINE))
TOLD_LOST = tl.constexpr(int(Told.LOST))
TOLD_STEP = tl.constexpr(int(Told.STEP))
TOLD_LAYER = tl.constexpr(int(Told.LAYER))
TOLD_END = tl.constexpr(int(Told.END))
TOLD_CANCELLED = tl.constexpr(int(Told.CANCELLED))
ANSWERED = tl.constexpr(int(WaitEnd.ANSWERED))
GIVEN_UP = tl.constexpr(int(WaitEnd.CANCELLED))
STALLED = tl.constexpr(int(WaitEnd.STALLED))
ABORTED = tl.constexpr(int(WaitEnd.ABORTED))
STALE = tl.constexpr(int(WaitEnd.STALE))
OVERWRITTEN = tl.constexpr(int(WaitEnd.OVERWRITTEN))
STALE_ANSWER = tl.constexpr(int(Contradiction.STALE_ANSWER))
OVERWRITTEN_ANSWER = tl.constexpr(int(Contradiction.OVERWRITTEN_ANSWER))
LAYER = tl.constexpr(int(SlotLine.LAYER))
SELECTED = tl.constexpr(int(WorkerState.SELECTED))
DETACHED = tl.constexpr(int(StagingWord.DETACHED))
PROGRESS = tl.constexpr(int(AnswersWord.PROGRESS))
CANCELLED = tl.constexpr(int(AnswersWord.CANCELLED))
DONES = tl.constexpr(int(AnswersWord.DONES))
STAGES = tl.constexpr(len(WorkerStage))
WAIT_ENDED = tl.constexpr(int(WorkerStage.WAIT_ENDED))
HANDED_BACK = tl.constexpr(int(WorkerStage.HANDED_BACK))

OFTEN = tl.constexpr(16)
"""Looks at the answer between two looks at the other words."""
SELDOM = tl.constexpr(256)
"""The same for the host's memory, which is far away."""

FEW_ROWS = 1
"""So many rows the waiting warp hands back faster than a launch of its own would."""
_BLOCK = 1024


@triton.jit
def _otherwise(
    step, attachment, answers, order, looks, progress, since, bound, PTX: tl.constexpr
):  # fmt: skip
    """Why to wait no longer (0: go on), the service's progress, and since when it is that."""
    end = tl.full((), 0, tl.int32)
    # The newest step that was given up: steps end in their order, and the host may be ahead.
    if look(line(answers, CANCELLED), PTX) >= step:
        end = tl.full((), GIVEN_UP, tl.int32)
    if looks % SELDOM == 0:
        if look(order.to(tl.int64), PTX) == attachment:
            end = tl.full((), ABORTED, tl.int32)
    made = look(line(answers, PROGRESS), PTX)
    now = first_thread(nanoseconds(PTX), PTX)
    if made != progress:
        since = now
    elif (end == 0) & (now - since >= bound):
        end = tl.full((), STALLED, tl.int32)
    return end, made, since


@triton.jit(
    do_not_specialize=("ordinal", "bound", "rows", "out_stride"),
    do_not_specialize_on_alignment=(
        "state", "decision", "order", "told", "begun", "found", "entries", "out",
    ),
)  # fmt: skip
def wait_kernel(
    state, decision, order, told, begun, found, entries, out, ordinal, bound: tl.int64, rows,
    out_stride: tl.int64, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, CHECKED: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait for a layer's answer and decide for all kernels behind. One program.

    order: int64 [1] in pinned host memory, the attachment that the host wants to end. told:
    int64 in pinned host memory, see `Told`. begun: int64 [1], see `WorkerMemory`. found, entries:
    see `tell_found`. bound: nanoseconds without progress of the service.
    ROWS: not 0: hand the answer back, too, into `rows` <= ROWS rows of `out`; as `hand_back`, also
    VECTOR. CHECKED: an answer that is another's is none.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    step = tl.load(state + CURRENT)
    attachment = tl.load(state + ATTACHMENT)
    staging = tl.load(state + STAGING)
    answers = tl.load(state + ANSWERS)
    block = tl.load(state + STAMPS)
    slot = tl.load(state + ANSWER_SLOT)
    step_rows = tl.load(state + STEP_ROWS)
    layers_answered = tl.load(state + LAYERS_ANSWERED)
    layers_inline = tl.load(state + LAYERS_INLINE)
    newest = tl.load(begun)
    end = tl.full((), GIVEN_UP, tl.int32)
    if step != 0:
        done = line(answers, DONES + ordinal)
        end = tl.full((), 0, tl.int32)
        looks = tl.full((), 1, tl.int32)
        since = first_thread(nanoseconds(PTX), PTX)
        progress = look(line(answers, PROGRESS), PTX)
        while end == 0:
            if look(done, PTX) == step:
                end = tl.full((), ANSWERED, tl.int32)
            elif looks % OFTEN == 0:
                end, progress, since = _otherwise(
                    step, attachment, answers, order, looks, progress, since, bound, PTX
                )
            looks += 1
        tl.debug_barrier()
    ended = nanoseconds(PTX)
    if PDL:
        # Not before: what follows is large, and would hold room that the service needs to answer.
        tl.extra.cuda.gdc_launch_dependents()
    whose = line(slot, LAYER)
    wanted = generation(step, ordinal)
    answered = (step != 0) & (end == ANSWERED)
    seen = tl.full((), 0, tl.int64)
    if CHECKED:
        seen = held(whose, answered)
        if answered & (seen != wanted):
            end = tl.full((), STALE, tl.int32)
        answered = (step != 0) & (end == ANSWERED)
    if ROWS > 0:
        # The program is alone, and nothing that waits for it has begun.
        row = tl.cast(tl.arange(0, ROWS), tl.int64)[:, None]
        for first in range(0, K, BLOCK):
            place = first + tl.arange(0, BLOCK)[None, :]
            source = tl.multiple_of(int32_at(slot) + row * K + place, [1, VECTOR])
            inside = place < K
            index = tl.load(source, mask=inside & (row < step_rows) & answered, other=-1)
            to = tl.multiple_of(out + row * out_stride + place, [1, VECTOR])
            tl.store(to, index, mask=inside & (row < rows) & answered)
        if CHECKED:
            tl.debug_barrier()
            seen = tl.where(answered, held(whose, answered), seen)
            if answered & (seen != wanted):
                end = tl.full((), OVERWRITTEN, tl.int32)
            answered = (step != 0) & (end == ANSWERED)
    tl.store(state + SELECTED, newest)
    tl.store(decision + IS_ANSWERED, answered.to(tl.int32))
    tl.store(decision + IS_RESCUED, ((step != 0) & (end != ANSWERED)).to(tl.int32))
    tl.store(decision + IS_INLINE, tl.where(answered, 0, 1))
    if step != 0:
        stamp(block, ordinal * STAGES + WAIT_ENDED, ended)
        if answered:
            if ROWS > 0:
                stamp(block, ordinal * STAGES + HANDED_BACK, nanoseconds(PTX))
            tl.store(state + LAYERS_ANSWERED, layers_answered + 1)
        else:
            # There is nothing to hand back: that is over as well.
            stamp(block, ordinal * STAGES + HANDED_BACK, ended)
            tl.store(state + LAYERS_INLINE, layers_inline + 1)
            tl.store(state + CURRENT, 0)
            # The next layer's inline kernels may look at it before that layer's staging ends.
            tl.store(decision + IS_DETACHED, 1)
        if end == GIVEN_UP:
            count = tl.load(told + TOLD_CANCELLED)
            tl.debug_barrier()
            tl.store(told + TOLD_CANCELLED, count + 1)
        if CHECKED:
            if (end == STALE) | (end == OVERWRITTEN):
                kind = tl.where(end == STALE, STALE_ANSWER, OVERWRITTEN_ANSWER)
                tell_found(kind, step, ordinal, -1, -1, wanted, seen, found, entries, PTX)
        if (end == STALLED) | (end == ABORTED):
            tl.debug_barrier()
            tl.store(state + LOST, attachment)
            ring(line(staging, DETACHED), 1, PTX)
            tl.store(told + TOLD_STEP, step)
            tl.store(told + TOLD_LAYER, ordinal)
            tl.store(told + TOLD_END, end)
            tl.debug_barrier()
            ring((told + TOLD_LOST).to(tl.int64), attachment, PTX)


def wait(memory: WorkerMemory, *, ordinal: int, bound: int, out: Tensor | None = None) -> None:
    """Wait for a layer's answer on the current stream; can be captured.

    Args:
        bound: nanoseconds without progress of the service after which the attachment is over.
        out: int32 [T, top_k], T <= FEW_ROWS, rows contiguous: hand the answer back as well.
    """
    dependent = dependent_launch(memory.device)
    k = memory.geometry.top_k
    rows, stride = (0, 0) if out is None else (len(out), out.stride(0))
    padded_rows = triton.next_power_of_2(rows) if rows else 0
    to = memory.decision if out is None else out
    wait_kernel[(1,)](
        memory.state, memory.decision, memory.order, memory.told, memory.begun,
        memory.found.count, memory.found.entries, to, ordinal, bound, rows, stride,
        ROWS=padded_rows, K=k, BLOCK=min(_BLOCK, triton.next_power_of_2(k)),
        VECTOR=together(to.data_ptr(), stride * INDEX_BYTES, k * INDEX_BYTES),
        CHECKED=memory.checks_generations, PTX=memory.is_cuda, PDL=dependent, num_warps=1,
        launch_pdl=dependent,
    )  # fmt: skip
