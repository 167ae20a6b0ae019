"""The service tells that a layer is answered, or that a window of work is finished."""

from typing import Any

import triton
import triton.language as tl

from ipc_handoff.device import (
    LINE,
    generation,
    held,
    last_to_arrive,
    line,
    nanoseconds,
    ring,
    stamp,
    stamps_of,
    word,
)
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, SlotLine
from ipc_handoff.kernels.launch import dependent_launch
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import GateEnd, Live
from ipc_handoff.stages import ServiceStage

LIVE = tl.constexpr(int(Live.LIVE))
REASON = tl.constexpr(int(Live.REASON))
SEEN = tl.constexpr(int(Live.SEEN))
RACED_LAYER = tl.constexpr(int(GateEnd.RACED_LAYER))
LAYERS_ANSWERED = tl.constexpr(int(Live.ANSWERED))
PROGRESS = tl.constexpr(int(AnswersWord.PROGRESS))
DONES = tl.constexpr(int(AnswersWord.DONES))
CANCELLED = tl.constexpr(int(AnswersWord.CANCELLED))
LAYER = tl.constexpr(int(SlotLine.LAYER))
STAGES = tl.constexpr(len(ServiceStage))
TOPK_DONE = tl.constexpr(int(ServiceStage.TOPK_DONE))
ANSWERED = tl.constexpr(int(ServiceStage.ANSWERED))

_WINDOW = -1
"""Stands for the ordinal where no layer is done yet."""


@triton.jit
def tell_layer(
    programs, PTX: tl.constexpr, step_word, live, progress, arrived, answers, bell, staged, answer,
    stamps, stamped, stamp_stride,
):  # fmt: skip
    """Ring for a layer and for progress, by the last of so many programs that come here.

    Or give the step up, if other q and weights have come over those that were scored.
    arrived: int32 [1], 0, and so again afterwards. bell: address of the layer's word; staged,
    answer: of the step's slots, see `gate_kernel`. Nothing of it is written unless the step is
    live.
    """
    # Loaded before the programs are counted: it takes as long.
    step = tl.load(step_word)
    made = tl.load(progress) + 1
    answered = tl.load(live + LAYERS_ANSWERED) + 1
    block = stamps_of(stamps, step, stamped, stamp_stride)
    ordinal = (bell - line(answers, DONES)) // LINE
    wanted = generation(step, ordinal)
    # Scoring is over: the kernel before this one has read the slot.
    seen = held(line(staged, LAYER), staged != 0)
    if last_to_arrive(arrived, programs):
        # Before the bell: what it causes must not look earlier than it.
        now = nanoseconds(PTX)
        stamp(block, ordinal * STAGES + TOPK_DONE, now)
        if (staged == 0) | (seen == wanted):
            stamp(block, ordinal * STAGES + ANSWERED, now)
            tl.store(word(line(answer, LAYER)), wanted)
            ring(bell, step, PTX)
            tl.store(live + LAYERS_ANSWERED, answered)
            tl.store(progress, made)
            ring(line(answers, PROGRESS), made, PTX)
        else:
            tl.store((live + SEEN).to(tl.pointer_type(tl.int64)), seen)
            tl.store(live + REASON, RACED_LAYER)
            tl.store(live + LIVE, 0)
            ring(line(answers, CANCELLED), step, PTX)


@triton.jit(
    do_not_specialize=(
        "answers",
        "ordinal",
        "staged",
        "answer",
        "stamps",
        "stamped",
        "stamp_stride",
    ),
    do_not_specialize_on_alignment=("step_word", "live", "progress", "arrived"),
)
def done_kernel(
    step_word, live, progress, arrived, answers: tl.int64, ordinal, staged: tl.int64,
    answer: tl.int64, stamps: tl.int64, stamped, stamp_stride: tl.int64, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Ring for a layer, unless `ordinal` is negative, and for progress. One program.

    The kernel before it on the stream stored the answer; that kernel's end orders it before this.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    made = tl.load(progress) + 1
    if tl.load(live + LIVE) != 0:
        if ordinal >= 0:
            bell = line(answers, DONES + ordinal)
            tell_layer(
                1, PTX, step_word, live, progress, arrived, answers, bell, staged, answer, stamps,
                stamped, stamp_stride,
            )  # fmt: skip
        else:
            tl.debug_barrier()
            tl.store(progress, made)
            ring(line(answers, PROGRESS), made, PTX)


def telling(memory: ServiceMemory, ordinal: int, slot: int) -> tuple[Any, ...]:
    """What a kernel gives to `tell_layer`, behind how many programs come there, and PTX.

    Args:
        slot: of the step.
    """
    bell = memory.answers + (AnswersWord.DONES + ordinal) * DEVICE_LINE
    return (
        memory.step, memory.live, memory.progress, memory.arrived, memory.answers, bell,
        memory.looked_at(slot), memory.answer_at(slot), *memory.stamp_numbers,
    )  # fmt: skip


def done(memory: ServiceMemory, ordinal: int, slot: int) -> None:
    """Tell the worker that a layer's answer is written, into the step's slot; can be captured."""
    _tell(memory, ordinal, slot)


def advance(memory: ServiceMemory) -> None:
    """Tell the worker that one more window of work is finished."""
    _tell(memory, _WINDOW, 0)


def _tell(memory: ServiceMemory, ordinal: int, slot: int) -> None:
    dependent = dependent_launch(memory.device)
    done_kernel[(1,)](
        memory.step, memory.live, memory.progress, memory.arrived, memory.answers, ordinal,
        memory.looked_at(slot), memory.answer_at(slot), *memory.stamp_numbers,
        PTX=memory.is_cuda, PDL=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip
