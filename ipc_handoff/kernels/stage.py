"""The worker stages one layer and rings for it."""

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import (
    bytes_at,
    int32_at,
    last_to_arrive,
    line,
    nanoseconds,
    ring,
    stamp,
)
from ipc_handoff.device_layout import StagingWord
from ipc_handoff.kernels.launch import dependent_launch, together
from ipc_handoff.kernels.words import Decision, WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.stages import WorkerStage

ARMED = tl.constexpr(int(WorkerState.ARMED))
CURRENT = tl.constexpr(int(WorkerState.CURRENT))
ROWS_OF_STEP = tl.constexpr(int(WorkerState.ROWS))
STAGING = tl.constexpr(int(WorkerState.STAGING))
STAGING_SLOT = tl.constexpr(int(WorkerState.STAGING_SLOT))
STAMPS = tl.constexpr(int(WorkerState.STAMPS))
IS_DETACHED = tl.constexpr(int(Decision.DETACHED))
REQUESTS = tl.constexpr(int(StagingWord.REQUESTS))
STAGES = tl.constexpr(len(WorkerStage))
STAGE_BEGUN = tl.constexpr(int(WorkerStage.STAGE_BEGUN))
REQUEST_RUNG = tl.constexpr(int(WorkerStage.REQUEST_RUNG))

FEW_ROWS = 8
"""So many rows one program stages faster than programs that count each other."""
_WARPS = 8
_WARPS_OF_FEW = 16


@triton.jit(
    do_not_specialize=(
        "ordinal", "first", "rows", "q_stride", "weights_stride", "q_at", "weights_at",
    ),
    do_not_specialize_on_alignment=("q", "weights", "state", "decision", "arrived"),
)  # fmt: skip
def stage_kernel(
    q, weights, state, decision, arrived, ordinal, first, rows, q_stride: tl.int64,
    weights_stride: tl.int64, q_at: tl.int64, weights_at: tl.int64, ROWS: tl.constexpr,
    Q_BYTES: tl.constexpr, HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    VECTOR: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stage one layer's q and weights and ring for it. A program every ROWS rows.

    q: uint8 [rows, Q_BYTES], weights: fp32 [rows, HEADS], rows contiguous, q's at multiples of
    VECTOR bytes. first: it is the forward's first layer, which takes the armed step; a forward
    without one works inline.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begun = nanoseconds(PTX)
    program = tl.program_id(0)
    row = (tl.cast(program, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    # All loads at once: none waits for another's answer.
    armed = tl.load(state + ARMED)
    step = tl.load(state + CURRENT)
    step_rows = tl.load(state + ROWS_OF_STEP)
    staging = tl.load(state + STAGING)
    slot = tl.load(state + STAGING_SLOT)
    block = tl.load(state + STAMPS)
    byte = tl.arange(0, BLOCK_Q)[None, :]
    there = (byte < Q_BYTES) & (row < rows)
    codes = tl.load(tl.multiple_of(q + row * q_stride + byte, [1, VECTOR]), mask=there)
    head = tl.arange(0, BLOCK_H)[None, :]
    bits = tl.load(weights + row * weights_stride + head, mask=(head < HEADS) & (row < rows))
    if first:
        step = armed
    if step != 0:
        # Rows behind the step's are a captured batch's padding: nobody asked for them.
        wanted = row < tl.minimum(step_rows, rows)
        to = tl.multiple_of(bytes_at(slot + q_at) + row * Q_BYTES + byte, [1, VECTOR])
        tl.store(to, codes, mask=(byte < Q_BYTES) & wanted)
        place = int32_at(slot + weights_at) + row * HEADS + head
        tl.store(place, bits.to(tl.int32, bitcast=True), mask=(head < HEADS) & wanted)
        if program == 0:
            stamp(block, ordinal * STAGES + STAGE_BEGUN, begun)
    if last_to_arrive(arrived, tl.num_programs(0)):
        if step != 0:
            # Before the bell: what it causes must not look earlier than it.
            stamp(block, ordinal * STAGES + REQUEST_RUNG, nanoseconds(PTX))
            ring(line(staging, REQUESTS + ordinal), step, PTX)
        if first:
            tl.store(state + CURRENT, step)
            tl.store(state + ARMED, 0)
        tl.store(decision + IS_DETACHED, (step == 0).to(tl.int32))


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
    warps = _WARPS_OF_FEW if 2 < len(q) <= FEW_ROWS else _WARPS
    together_rows = 1 if len(q) > FEW_ROWS else triton.next_power_of_2(len(q))
    stage_kernel[(triton.cdiv(len(q), together_rows),)](
        q, weights, memory.state, memory.decision, memory.arrived, ordinal, int(first), len(q),
        q.stride(0), weights.stride(0), layout.q, layout.weights,
        ROWS=together_rows, Q_BYTES=q_bytes, HEADS=heads, BLOCK_Q=triton.next_power_of_2(q_bytes),
        BLOCK_H=triton.next_power_of_2(heads), VECTOR=vector, PTX=memory.is_cuda,
        PDL=dependent, num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip
