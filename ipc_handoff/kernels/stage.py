"""The worker stages one layer and rings for it."""

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import (
    bytes_at,
    generation,
    int32_at,
    last_to_arrive,
    line,
    nanoseconds,
    ring,
    stamp,
    word,
)
from ipc_handoff.device_layout import SlotLine, StagingWord
from ipc_handoff.kernels.launch import dependent_launch, together
from ipc_handoff.kernels.words import Decision, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WorkerStage

ARMED = tl.constexpr(int(WorkerState.ARMED))
CURRENT = tl.constexpr(int(WorkerState.CURRENT))
ROWS = tl.constexpr(int(WorkerState.ROWS))
STAGING = tl.constexpr(int(WorkerState.STAGING))
STAGING_SLOT = tl.constexpr(int(WorkerState.STAGING_SLOT))
STAMPS = tl.constexpr(int(WorkerState.STAMPS))
IS_DETACHED = tl.constexpr(int(Decision.DETACHED))
REQUESTS = tl.constexpr(int(StagingWord.REQUESTS))
LAYER = tl.constexpr(int(SlotLine.LAYER))
STAGES = tl.constexpr(len(WorkerStage))
STAGE_BEGUN = tl.constexpr(int(WorkerStage.STAGE_BEGUN))
REQUEST_RUNG = tl.constexpr(int(WorkerStage.REQUEST_RUNG))

_WARPS = 8


@triton.jit(
    do_not_specialize=(
        "ordinal", "first", "rows", "q_stride", "weights_stride", "q_at", "weights_at",
    ),
    do_not_specialize_on_alignment=("q", "weights", "state", "decision", "arrived"),
)  # fmt: skip
def stage_kernel(
    q, weights, state, decision, arrived, ordinal, first, rows, q_stride: tl.int64,
    weights_stride: tl.int64, q_at: tl.int64, weights_at: tl.int64, Q_BYTES: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, VECTOR: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stage one layer's q and weights and ring for it. A program a row.

    q: uint8 [rows, Q_BYTES], weights: fp32 [rows, HEADS], rows contiguous, q's at multiples of
    VECTOR bytes. first: it is the forward's first layer, which takes the armed step; a forward
    without one works inline.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begun = nanoseconds(PTX)
    row = tl.cast(tl.program_id(0), tl.int64)
    # All loads at once: none waits for another's answer.
    armed = tl.load(state + ARMED)
    step = tl.load(state + CURRENT)
    step_rows = tl.load(state + ROWS)
    staging = tl.load(state + STAGING)
    slot = tl.load(state + STAGING_SLOT)
    block = tl.load(state + STAMPS)
    byte = tl.arange(0, BLOCK_Q)
    codes = tl.load(tl.multiple_of(q + row * q_stride + byte, VECTOR), mask=byte < Q_BYTES)
    head = tl.arange(0, BLOCK_H)
    bits = tl.load(weights + row * weights_stride + head, mask=head < HEADS)
    if first:
        step = armed
    whose = word(line(slot, LAYER))
    # Rows behind the step's are a captured batch's padding: nobody asked for them.
    if (step != 0) & (row < step_rows):
        if row == 0:
            tl.store(whose, generation(step, ordinal) - 1)
        to = tl.multiple_of(bytes_at(slot + q_at) + row * Q_BYTES + byte, VECTOR)
        tl.store(to, codes, mask=byte < Q_BYTES)
        place = int32_at(slot + weights_at) + row * HEADS + head
        tl.store(place, bits.to(tl.int32, bitcast=True), mask=head < HEADS)
        if row == 0:
            stamp(block, ordinal * STAGES + STAGE_BEGUN, begun)
    if last_to_arrive(arrived, rows):
        if step != 0:
            # Before the bell: what it causes must not look earlier than it.
            stamp(block, ordinal * STAGES + REQUEST_RUNG, nanoseconds(PTX))
            tl.store(whose, generation(step, ordinal))
            ring(line(staging, REQUESTS + ordinal), step, PTX)
        tl.store(decision + IS_DETACHED, (step == 0).to(tl.int32))
        if first:
            tl.store(state + CURRENT, step)
            tl.store(state + ARMED, 0)


def stage(memory: WorkerMemory, q: Tensor, weights: Tensor, *, ordinal: int, first: bool) -> None:
    """Stage a layer of the running forward on the current stream; can be captured.

    Args:
        q: uint8 [T, heads * head_dim], weights: fp32 [T, heads], rows contiguous; T may be more
            than the step has.
        ordinal: of the layer.
        first: it is the forward's first layer.
    """
    geometry, layout = memory.geometry, memory.geometry.device
    dependent = dependent_launch(memory.device)
    q_bytes, heads = geometry.heads * geometry.head_dim, geometry.heads
    vector = together(q.data_ptr(), q.stride(0), q_bytes)
    stage_kernel[(len(q),)](
        q, weights, memory.state, memory.decision, memory.arrived, ordinal, int(first), len(q),
        q.stride(0), weights.stride(0), layout.q, layout.weights,
        Q_BYTES=q_bytes, HEADS=heads, BLOCK_Q=triton.next_power_of_2(q_bytes),
        BLOCK_H=triton.next_power_of_2(heads), VECTOR=vector, PTX=memory.is_cuda,
        PDL=dependent, num_warps=_WARPS, launch_pdl=dependent,
    )  # fmt: skip
