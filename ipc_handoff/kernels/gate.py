"""The service waits until the worker has written what comes next, or gives the step up."""

import triton
import triton.language as tl

from ipc_handoff.device import (
    clear_stamps,
    first_thread,
    generation,
    held,
    line,
    look,
    nanoseconds,
    ring,
    stamp,
    stamps_of,
    word,
)
from ipc_handoff.device_layout import AnswersWord, SlotLine, StagingWord
from ipc_handoff.kernels.launch import dependent_launch
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Gate, GateEnd, Live
from ipc_handoff.stages import ServiceStage

LIVE = tl.constexpr(int(Live.LIVE))
REASON = tl.constexpr(int(Live.REASON))
SEEN = tl.constexpr(int(Live.SEEN))
LAYERS_ANSWERED = tl.constexpr(int(Live.ANSWERED))
GATE_PUBLISHED = tl.constexpr(int(Gate.PUBLISHED))
GATE_FIRST_LAYER = tl.constexpr(int(Gate.FIRST_LAYER))
GATE_LAYER = tl.constexpr(int(Gate.LAYER))
PASSED = tl.constexpr(int(GateEnd.PASSED))
LATE = tl.constexpr(int(GateEnd.LATE))
NEWER = tl.constexpr(int(GateEnd.NEWER))
IS_DETACHED = tl.constexpr(int(GateEnd.DETACHED))
CLOSING = tl.constexpr(int(GateEnd.CLOSING))
RACED_INPUTS = tl.constexpr(int(GateEnd.RACED_INPUTS))
RACED_LAYER = tl.constexpr(int(GateEnd.RACED_LAYER))
INPUTS = tl.constexpr(int(SlotLine.INPUTS))
LAYER = tl.constexpr(int(SlotLine.LAYER))
PUBLISHED = tl.constexpr(int(StagingWord.PUBLISHED))
DETACHED = tl.constexpr(int(StagingWord.DETACHED))
REQUESTS = tl.constexpr(int(StagingWord.REQUESTS))
CANCELLED = tl.constexpr(int(AnswersWord.CANCELLED))
STAGES = tl.constexpr(len(ServiceStage))
GATE_BEGUN = tl.constexpr(int(ServiceStage.GATE_BEGUN))
GATE_PASSED = tl.constexpr(int(ServiceStage.GATE_PASSED))

OFTEN = tl.constexpr(16)
"""Looks at the word between two looks at the others."""
SELDOM = tl.constexpr(256)
"""The same for the host's memory, which is far away."""
CLEARED = tl.constexpr(128)
"""Stamps that are cleared at a time."""


@triton.jit
def _otherwise(step, staging, closing, looks, since, bound, PTX: tl.constexpr):
    """Why not to wait any longer; 0: go on."""
    end = tl.full((), 0, tl.int32)
    if first_thread(nanoseconds(PTX), PTX) - since >= bound:
        end = tl.full((), LATE, tl.int32)
    if looks % SELDOM == 0:
        if look(closing.to(tl.int64), PTX) != 0:
            end = tl.full((), CLOSING, tl.int32)
    if look(line(staging, DETACHED), PTX) != 0:
        end = tl.full((), IS_DETACHED, tl.int32)
    if look(line(staging, PUBLISHED), PTX) > step:
        end = tl.full((), NEWER, tl.int32)
    return end


@triton.jit
def _whose(end, gate, step, ordinal, staged):
    """How a gate that was passed ends by what the slot holds, and what it holds. staged: 0: nobody
    asks.
    """
    asked = (end == PASSED) & (staged != 0)
    of_inputs = asked & (gate != GATE_LAYER)
    of_layer = asked & (gate != GATE_PUBLISHED)
    inputs = held(line(staged, INPUTS), of_inputs)
    layer = held(line(staged, LAYER), of_layer)
    seen = tl.full((), 0, tl.int64)
    if of_layer & (layer != generation(step, ordinal)):
        end, seen = tl.full((), RACED_LAYER, tl.int32), layer
    if of_inputs & (inputs != generation(step, 0)):
        end, seen = tl.full((), RACED_INPUTS, tl.int32), inputs
    return end, seen


@triton.jit(
    do_not_specialize=(
        "staging", "answers", "staged", "answer", "gate", "ordinal", "bound", "stamps", "stamped",
        "stamp_stride", "cells",
    ),
    do_not_specialize_on_alignment=("step_word", "live", "closing"),
)  # fmt: skip
def gate_kernel(
    step_word, live, closing, staging: tl.int64, answers: tl.int64, staged: tl.int64,
    answer: tl.int64, gate, ordinal, bound: tl.int64, stamps: tl.int64, stamped,
    stamp_stride: tl.int64, cells, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait until the worker has written this step, or give the rest of it up. One program.

    step_word: int64 [1], the stream's step. live: int32, see `Live`. closing: int64 [1] in pinned
    host memory; not 0: the service wants the step to end. staged, answer: addresses of the step's
    slots; staged 0: whose data is in there is not looked at. gate: see `Gate`. bound: nanoseconds.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    step = tl.load(step_word)
    wanted = tl.load(live + LIVE) != 0
    at = line(staging, REQUESTS + ordinal)
    block = stamps_of(stamps, step, stamped, stamp_stride)
    since = first_thread(nanoseconds(PTX), PTX)
    end = tl.full((), 0, tl.int32)
    if gate == GATE_PUBLISHED:
        wanted = tl.full((), True, tl.int1)
        at = line(staging, PUBLISHED)
        clear_stamps(block, step, cells, CLEARED)
    if wanted:
        looks = tl.full((), 1, tl.int32)
        while end == 0:
            if look(at, PTX) == step:
                end = tl.full((), PASSED, tl.int32)
            elif looks % OFTEN == 0:
                end = _otherwise(step, staging, closing, looks, since, bound, PTX)
            looks += 1
        if (end == PASSED) & (gate == GATE_FIRST_LAYER):
            # A newer step may have been staged over what was copied behind the first gate.
            if look(line(staging, PUBLISHED), PTX) != step:
                end = tl.full((), NEWER, tl.int32)
        tl.debug_barrier()
    if PDL:
        # Not before: what follows is large, and would hold room that the worker needs to come.
        tl.extra.cuda.gdc_launch_dependents()
    if wanted:
        end, seen = _whose(end, gate, step, ordinal, staged)
        if (end == RACED_LAYER) | (end == RACED_INPUTS):
            tl.store((live + SEEN).to(tl.pointer_type(tl.int64)), seen)
        tl.store(live + LIVE, (end == PASSED).to(tl.int32))
        if gate == GATE_PUBLISHED:
            tl.store(live + LAYERS_ANSWERED, 0)
            tl.store(live + REASON, end)
        elif end == PASSED:
            tl.store(word(line(answer, LAYER)), generation(step, ordinal) - 1)
            stamp(block, ordinal * STAGES + GATE_BEGUN, since)
            stamp(block, ordinal * STAGES + GATE_PASSED, nanoseconds(PTX))
        else:
            tl.store(live + REASON, end)
        if end != PASSED:
            ring(line(answers, CANCELLED), step, PTX)


def gate(memory: ServiceMemory, kind: Gate, *, slot: int, ordinal: int = 0, bound: int) -> None:
    """Gate the stream until the worker has written the stream's step; can be captured.

    Args:
        slot: of the step.
        ordinal: of the layer.
        bound: nanoseconds after which the step is given up.
    """
    dependent = dependent_launch(memory.device)
    gate_kernel[(1,)](
        memory.step, memory.live, memory.closing, memory.staging, memory.answers,
        memory.looked_at(slot), memory.answer_at(slot), int(kind), ordinal, bound,
        *memory.stamp_numbers, memory.cells,
        PTX=memory.is_cuda, PDL=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip
