"""The service wakes a worker whose stream sleeps until a layer is answered, or given up.

The flags are the worker's for its life, also for the next service: they are left alone once the
worker has detached, or gone on to another step.
"""

import triton
import triton.language as tl

from ipc_handoff.device import LINE, line, look, ring
from ipc_handoff.device_layout import StagingWord
from ipc_handoff.flag_words import Answer
from ipc_handoff.kernels.launch import dependent_launch
from ipc_handoff.kernels.service_memory import ServiceMemory
from ipc_handoff.kernels.words import Live

LIVE = tl.constexpr(int(Live.LIVE))
PUBLISHED = tl.constexpr(int(StagingWord.PUBLISHED))
DETACHED = tl.constexpr(int(StagingWord.DETACHED))
IS_ANSWERED = tl.constexpr(int(Answer.ANSWERED))
IS_CANCELLED = tl.constexpr(int(Answer.CANCELLED))

_NO_ADDRESS = 0
"""Stands for the answer's where no layer is done yet."""


@triton.jit
def _is_waited_for(step, staging, PTX: tl.constexpr):
    """Whether the worker is in this step, and has not detached."""
    is_ours = look(line(staging, DETACHED), PTX) == 0
    return is_ours & (look(line(staging, PUBLISHED), PTX) == step) & (step != 0)


@triton.jit(
    do_not_specialize=("staging", "answer_flag", "progress_flag"),
    do_not_specialize_on_alignment=("step_word", "live", "progress"),
)
def tell_kernel(
    step_word, live, progress, staging: tl.int64, answer_flag: tl.int64, progress_flag: tl.int64,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Raise a layer's answer flag, unless its address is 0, and that of progress. One program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    step = tl.load(step_word)
    made = tl.load(progress)
    is_live = tl.load(live + LIVE) != 0
    is_ours = _is_waited_for(step, staging, PTX)
    tl.debug_barrier()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if is_ours:
        if is_live:
            ring(progress_flag, made, PTX)
        if answer_flag != 0:
            how = tl.where(is_live, IS_ANSWERED, IS_CANCELLED)
            ring(answer_flag, how.to(tl.int64), PTX)


def tell(memory: ServiceMemory, progress_flag: int, answer_flag: int = _NO_ADDRESS) -> None:
    """Behind `done` or `advance`, on the current stream.

    Args:
        progress_flag, answer_flag: addresses of the words, see `flag_words`; no `answer_flag`: a
            layer's window is finished, and the layer not yet.
    """
    dependent = dependent_launch(memory.device)
    tell_kernel[(1,)](
        memory.step, memory.live, memory.progress, memory.staging, answer_flag, progress_flag,
        PTX=memory.is_cuda, PDL=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("step", "staging", "first_answer", "layers"))
def tell_given_up_kernel(
    step: tl.int64, staging: tl.int64, first_answer: tl.int64, layers, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Raise the answer flags of all layers, a line each. One program.

    A worker that comes to the step later finds it in the `CANCELLED` word (see `flag`), which the
    kernel before this one wrote: of the two, one sees the other.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    is_ours = _is_waited_for(step, staging, PTX)
    tl.debug_barrier()
    if is_ours:
        for ordinal in range(layers):
            ring(first_answer + ordinal * LINE, tl.full((), IS_CANCELLED, tl.int64), PTX)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def tell_given_up(memory: ServiceMemory, step: int, first_answer: int) -> None:
    """Behind the word that says so of a step that was not launched, on the current stream.

    Args:
        first_answer: address of the first layer's answer flag, see `flag_words`.
    """
    dependent = dependent_launch(memory.device)
    tell_given_up_kernel[(1,)](
        step, memory.staging, first_answer, len(memory.geometry.layers), PTX=memory.is_cuda,
        PDL=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip
