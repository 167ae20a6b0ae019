"""The worker hands an answered layer's selection back, to where attention reads it."""

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import generation, held, int32_at, line, nanoseconds, stamp
from ipc_handoff.device_layout import SlotLine
from ipc_handoff.kernels.found import Contradiction, tell_found
from ipc_handoff.kernels.launch import INDEX_BYTES, dependent_launch, together
from ipc_handoff.kernels.words import Decision, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WorkerStage

CURRENT = tl.constexpr(int(WorkerState.CURRENT))
STEP_ROWS = tl.constexpr(int(WorkerState.ROWS))
ANSWER_SLOT = tl.constexpr(int(WorkerState.ANSWER_SLOT))
STAMPS = tl.constexpr(int(WorkerState.STAMPS))
IS_ANSWERED = tl.constexpr(int(Decision.ANSWERED))
LAYER = tl.constexpr(int(SlotLine.LAYER))
OVERWRITTEN_ANSWER = tl.constexpr(int(Contradiction.OVERWRITTEN_ANSWER))
STAGES = tl.constexpr(len(WorkerStage))
HANDED_BACK = tl.constexpr(int(WorkerStage.HANDED_BACK))

_WARPS = 8
BLOCK = 2048
"""Indices that a program moves at a time."""
_TOGETHER = {1: 1, 1024: 4}
"""Rows of a program, from so many rows on. More programs than a GPU holds take turns, and each
begins by looking at memory."""
KINDS = tuple(_TOGETHER)
"""Rows for each kernel that there is."""


@triton.jit
def hand_rows_back(
    state, decision, found, entries, out, first_row, rows, ordinal, out_stride,
    ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    CHECKED: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write an answered layer's selection into ROWS rows of `out`, int32 [rows, K].

    What a kernel behind a wait begins with: with PDL it is launched before that one's end.
    Without an answer nothing is written. Rows behind the step's get -1.
    VECTOR: rows of answer and `out` begin at multiples of so many bytes. CHECKED: rows of an answer
    that is overwritten meanwhile get -1; found, entries: see `tell_found`.
    """
    if PDL:
        # Who comes next waits for this kernel's end: launched now, it is there by then.
        tl.extra.cuda.gdc_launch_dependents()
    # Of the step, not of the layer: what the wait may write meanwhile is that there is none.
    step = tl.load(state + CURRENT, volatile=True)
    step_rows = tl.load(state + STEP_ROWS, volatile=True)
    slot = tl.load(state + ANSWER_SLOT, volatile=True)
    block = tl.load(state + STAMPS, volatile=True)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Side by side with the answer, which is thrown away if it is none.
    answered = tl.load(decision + IS_ANSWERED) != 0
    for j in tl.static_range(ROWS):
        row = first_row + j
        given = (step != 0) & (row < step_rows)
        for first in range(0, K, BLOCK):
            place = first + tl.arange(0, BLOCK)
            chosen = tl.multiple_of(int32_at(slot) + row * K + place, VECTOR)
            index = tl.load(chosen, mask=(place < K) & given, other=-1)
            to = tl.multiple_of(out + row * out_stride + place, VECTOR)
            tl.store(to, index, mask=(place < K) & (row < rows) & answered)
    if CHECKED:
        tl.debug_barrier()  # all of it is read
        given = answered & (step != 0)
        wanted = generation(step, ordinal)
        seen = held(line(slot, LAYER), given)
        if given & (seen != wanted):
            for j in tl.static_range(ROWS):
                row = first_row + j
                for first in range(0, K, BLOCK):
                    place = first + tl.arange(0, BLOCK)
                    none = tl.full((BLOCK,), -1, tl.int32)
                    tl.store(out + row * out_stride + place, none, mask=(place < K) & (row < rows))
            tell_found(
                OVERWRITTEN_ANSWER, step, ordinal, first_row, -1, wanted, seen, found, entries, PTX
            )
    if answered & (first_row == 0):
        stamp(block, ordinal * STAGES + HANDED_BACK, nanoseconds(PTX))


@triton.jit(
    do_not_specialize=("rows", "ordinal", "out_stride"),
    do_not_specialize_on_alignment=("state", "decision", "found", "entries", "out"),
)
def hand_back_kernel(
    state, decision, found, entries, out, rows, ordinal, out_stride: tl.int64,
    TOGETHER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    CHECKED: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `hand_rows_back`. A program for TOGETHER rows."""
    row = tl.cast(tl.program_id(0), tl.int64) * TOGETHER
    hand_rows_back(
        state, decision, found, entries, out, row, rows, ordinal, out_stride, TOGETHER, K, BLOCK,
        VECTOR, CHECKED, PTX, PDL,
    )  # fmt: skip


def hand_back(memory: WorkerMemory, out: Tensor, *, ordinal: int) -> None:
    """Write an answered layer's selection into `out` on the current stream; can be captured.

    Inline kernels write `out` otherwise (see `WorkerMemory`): of all of them one does.

    Args:
        out: int32 [T, top_k], rows contiguous; T may be more rows than the step has.
    """
    dependent = dependent_launch(memory.device)
    k = memory.geometry.top_k
    vector = together(out.data_ptr(), out.stride(0) * INDEX_BYTES, k * INDEX_BYTES)
    rows = len(out)
    each = max(each for first, each in _TOGETHER.items() if first <= rows)
    hand_back_kernel[(-(-rows // each),)](
        memory.state, memory.decision, memory.found.count, memory.found.entries, out, rows,
        ordinal, out.stride(0), TOGETHER=each, K=k,
        BLOCK=min(BLOCK, triton.next_power_of_2(k)), VECTOR=vector,
        CHECKED=memory.checks_generations, PTX=memory.is_cuda, PDL=dependent, num_warps=_WARPS,
        launch_pdl=dependent,
    )  # fmt: skip
