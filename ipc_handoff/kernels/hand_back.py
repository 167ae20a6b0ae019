"""The worker hands a layer's selection back: the only kernel that writes what attention reads."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import int32_at, nanoseconds, stamp, stamps_of
from ipc_handoff.kernels.launch import dependent_launch
from ipc_handoff.kernels.words import Decision, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WorkerStage

CURRENT = tl.constexpr(int(WorkerState.CURRENT))
ROWS = tl.constexpr(int(WorkerState.ROWS))
BANK = tl.constexpr(int(WorkerState.BANK))
IS_ANSWERED = tl.constexpr(int(Decision.ANSWERED))
STAGES = tl.constexpr(len(WorkerStage))
HANDED_BACK = tl.constexpr(int(WorkerStage.HANDED_BACK))

_WARPS = 8
_BLOCK = 2048
_VECTOR_BYTES = 16
_INDEX_BYTES = 4


@triton.jit(
    do_not_specialize=(
        "ordinal", "out_stride", "slots", "slots_at", "slot_stride", "stamps", "stamped",
        "stamp_stride",
    ),
    do_not_specialize_on_alignment=("state", "banks", "decision", "out"),
)  # fmt: skip
def hand_back_kernel(
    state, banks, decision, private, out, ordinal, out_stride: tl.int64, slots,
    slots_at: tl.int64, slot_stride: tl.int64, stamps: tl.int64, stamped, stamp_stride: tl.int64,
    K: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write a layer's selection into `out`, int32 [rows, K]. A program a row.

    From the answer slot if the answer came, else from `private`, int32 [rows, K], which the
    inline kernels filled. Rows behind the step's get -1. VECTOR: rows of all three begin at
    multiples of so many bytes.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.cast(tl.program_id(0), tl.int64)
    answered = tl.load(decision + IS_ANSWERED) != 0
    step = tl.load(state + CURRENT)
    step_rows = tl.load(state + ROWS)
    answers = tl.load(banks + 2 * tl.load(state + BANK) + 1)
    there = tl.full((), True, tl.int1)
    source = private
    if answered:
        source = int32_at(answers + slots_at + (step % slots) * slot_stride)
        there = row < step_rows
    source += row * K
    to = out + row * out_stride
    for first in range(0, K, BLOCK):
        place = first + tl.arange(0, BLOCK)
        chosen = tl.multiple_of(source + place, VECTOR)
        index = tl.load(chosen, mask=(place < K) & there, other=-1)
        tl.store(tl.multiple_of(to + place, VECTOR), index, mask=place < K)
    if answered & (row == 0):
        block = stamps_of(stamps, step, stamped, stamp_stride)
        stamp(block, ordinal * STAGES + HANDED_BACK, nanoseconds(PTX))


def hand_back(memory: WorkerMemory, out: Tensor, *, ordinal: int) -> None:
    """Write the selection of a layer into `out` on the current stream; can be captured.

    Args:
        out: int32 [T, top_k], rows contiguous; T may be more rows than the step has.
    """
    geometry, layout = memory.geometry, memory.geometry.device
    dependent = dependent_launch(memory.device)
    k = geometry.top_k
    together = math.gcd(
        _VECTOR_BYTES, out.data_ptr(), out.stride(0) * _INDEX_BYTES, k * _INDEX_BYTES
    )
    hand_back_kernel[(len(out),)](
        memory.state, memory.banks, memory.decision, memory.private, out, ordinal,
        out.stride(0), geometry.slots, layout.answers_slots, layout.answers_stride,
        memory.stamps.data_ptr(), *memory.stamp_numbers,
        K=k, BLOCK=min(_BLOCK, triton.next_power_of_2(k)), VECTOR=together, PTX=memory.is_cuda,
        PDL=dependent, num_warps=_WARPS, launch_pdl=dependent,
    )  # fmt: skip
