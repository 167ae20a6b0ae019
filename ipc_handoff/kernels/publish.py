"""The worker publishes a step: lengths and tables are staged, then the word says so."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.device import (
    clear_stamps,
    generation,
    int32_at,
    last_to_arrive,
    line,
    ring,
    word,
)
from ipc_handoff.device_layout import SlotLine, StagingWord
from ipc_handoff.kernels.words import WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory

ARMED = tl.constexpr(int(WorkerState.ARMED))
ROWS = tl.constexpr(int(WorkerState.ROWS))
STAGING = tl.constexpr(int(WorkerState.STAGING))
ANSWERS = tl.constexpr(int(WorkerState.ANSWERS))
STAGING_SLOT = tl.constexpr(int(WorkerState.STAGING_SLOT))
ANSWER_SLOT = tl.constexpr(int(WorkerState.ANSWER_SLOT))
STAMPS = tl.constexpr(int(WorkerState.STAMPS))
ATTACHMENT = tl.constexpr(int(WorkerState.ATTACHMENT))
LOST = tl.constexpr(int(WorkerState.LOST))
PUBLISHED = tl.constexpr(int(StagingWord.PUBLISHED))
INPUTS = tl.constexpr(int(SlotLine.INPUTS))

_NUMBERS = (
    "step", "attachment", "rows", "requests", "given", "needed", "table_stride", "staging",
    "answers", "staging_slot", "answer_slot", "query_start_at", "seq_lens_at", "table_at",
    "table_width", "stamps", "cells",
)  # fmt: skip
_COLUMNS = 512
"""Of a table's row, at a time."""


@triton.jit(
    do_not_specialize=_NUMBERS,
    do_not_specialize_on_alignment=("query_start", "seq_lens", "block_table", "state", "arrived"),
)
def publish_kernel(
    query_start, seq_lens, block_table, state, arrived, step: tl.int64, attachment: tl.int64, rows,
    requests, given, needed, table_stride: tl.int64, staging: tl.int64, answers: tl.int64,
    staging_slot: tl.int64, answer_slot: tl.int64, query_start_at: tl.int64,
    seq_lens_at: tl.int64, table_at: tl.int64, table_width, stamps: tl.int64, cells,
    BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stage what all layers of a step share, arm the step, then say so. A program a request.

    Unless a wait has given the attachment up meanwhile: then the forward works inline.
    given: columns of the caller's table; needed: columns that the plan's lengths can reach, of
    which those behind the given ones become -1.
    """
    request = tl.program_id(0)
    is_lost = tl.load(state + LOST) == attachment
    whose = word(line(staging_slot, INPUTS))
    if not is_lost:
        if request == 0:
            tl.store(whose, generation(step, 0) - 1)
        length = tl.load(seq_lens + request)
        tl.store(int32_at(staging_slot + seq_lens_at) + request, length)
        start = tl.load(query_start + request)
        tl.store(int32_at(staging_slot + query_start_at) + request, start)
        to = int32_at(staging_slot + table_at) + tl.cast(request, tl.int64) * table_width
        row = block_table + tl.cast(request, tl.int64) * table_stride
        for first in range(0, needed, BLOCK):
            column = first + tl.arange(0, BLOCK)
            page = tl.load(row + column, mask=column < given, other=-1)
            tl.store(to + column, page, mask=column < needed)
        if request == 0:
            end = tl.load(query_start + requests)
            tl.store(int32_at(staging_slot + query_start_at) + requests, end)
            clear_stamps(stamps, step, cells, BLOCK)
    if last_to_arrive(arrived, requests):
        if is_lost:
            tl.store(state + ARMED, 0)
        else:
            tl.store(state + ARMED, step)
            tl.store(state + ROWS, rows)
            tl.store(state + STAGING, staging)
            tl.store(state + ANSWERS, answers)
            tl.store(state + STAGING_SLOT, staging_slot)
            tl.store(state + ANSWER_SLOT, answer_slot)
            tl.store(state + STAMPS, stamps)
            tl.store(state + ATTACHMENT, attachment)
            tl.store(whose, generation(step, 0))
            ring(line(staging, PUBLISHED), step, PTX)


def publish(
    memory: WorkerMemory,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    step: int,
    attachment: int,
    staging: int,
    answers: int,
    rows: int,
    max_length: int,
) -> None:
    """Stage a step's offsets, lengths and tables on the current stream, and arm the step.

    The next forward on that stream takes it. Call it outside of any capture.

    Args:
        query_start: int32 [R + 1]; seq_lens: int32 [R]; block_table: int32 [R, n], rows contiguous.
        step: number of the step; attachment: of the attachment, from 1.
        staging, answers: addresses of its bank.
        rows: of the step.
        max_length: bound of the lengths; no more of the table is staged than it can reach.
    """
    geometry, layout = memory.geometry, memory.geometry.device
    needed = geometry.columns(max_length)
    slot = geometry.staging.slot_of(step)
    publish_kernel[(len(seq_lens),)](
        query_start, seq_lens, block_table, memory.state, memory.arrived, step, attachment, rows,
        len(seq_lens), block_table.shape[1], needed, block_table.stride(0), staging, answers,
        staging + layout.staging_at(slot), answers + layout.answers_at(slot), layout.query_start,
        layout.seq_lens, layout.block_table, geometry.table_width, memory.stamps_of(step),
        memory.cells,
        BLOCK=_COLUMNS, PTX=memory.is_cuda,
    )  # fmt: skip


def forget_armed(memory: WorkerMemory) -> None:
    """Let the next forward work inline, after a publication whose plan was not sent."""
    with torch.no_grad():
        memory.state[WorkerState.ARMED : WorkerState.ARMED + 1].zero_()
