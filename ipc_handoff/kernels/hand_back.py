"""The worker hands an answered layer's selection back, to where attention reads it."""

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import int32_at, nanoseconds, stamp
from ipc_handoff.kernels.launch import INDEX_BYTES, dependent_launch, together
from ipc_handoff.kernels.words import Decision, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WorkerStage

ROWS = tl.constexpr(int(WorkerState.ROWS))
ANSWER_SLOT = tl.constexpr(int(WorkerState.ANSWER_SLOT))
STAMPS = tl.constexpr(int(WorkerState.STAMPS))
IS_ANSWERED = tl.constexpr(int(Decision.ANSWERED))
STAGES = tl.constexpr(len(WorkerStage))
HANDED_BACK = tl.constexpr(int(WorkerStage.HANDED_BACK))

_WARPS = 8
_BLOCK = 2048


@triton.jit(
    do_not_specialize=("ordinal", "out_stride"),
    do_not_specialize_on_alignment=("state", "decision", "out"),
)
def hand_back_kernel(
    state, decision, out, ordinal, out_stride: tl.int64, K: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write an answered layer's selection into `out`, int32 [rows, K]. A program a row.

    Without an answer nothing is written: the inline kernels do it. Rows behind the step's get -1.
    VECTOR: rows of answer and `out` begin at multiples of so many bytes.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.cast(tl.program_id(0), tl.int64)
    answered = tl.load(decision + IS_ANSWERED)
    step_rows = tl.load(state + ROWS)
    slot = tl.load(state + ANSWER_SLOT)
    block = tl.load(state + STAMPS)
    if answered != 0:
        source = int32_at(slot) + row * K
        to = out + row * out_stride
        for first in range(0, K, BLOCK):
            place = first + tl.arange(0, BLOCK)
            chosen = tl.multiple_of(source + place, VECTOR)
            index = tl.load(chosen, mask=(place < K) & (row < step_rows), other=-1)
            tl.store(tl.multiple_of(to + place, VECTOR), index, mask=place < K)
        if row == 0:
            stamp(block, ordinal * STAGES + HANDED_BACK, nanoseconds(PTX))


def hand_back(memory: WorkerMemory, out: Tensor, *, ordinal: int) -> None:
    """Write an answered layer's selection into `out` on the current stream; can be captured.

    Inline kernels write `out` otherwise (see `WorkerMemory`): of all of them one does.

    Args:
        out: int32 [T, top_k], rows contiguous; T may be more rows than the step has.
    """
    dependent = dependent_launch(memory.device)
    k = memory.geometry.top_k
    vector = together(out.data_ptr(), out.stride(0) * INDEX_BYTES, k * INDEX_BYTES)
    hand_back_kernel[(len(out),)](
        memory.state, memory.decision, out, ordinal, out.stride(0),
        K=k, BLOCK=min(_BLOCK, triton.next_power_of_2(k)), VECTOR=vector, PTX=memory.is_cuda,
        PDL=dependent, num_warps=_WARPS, launch_pdl=dependent,
    )  # fmt: skip
