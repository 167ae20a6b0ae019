"""The worker raises a layer's flag, for a service whose stream sleeps until then."""

import triton
import triton.language as tl

from ipc_handoff.device import line, look, ring
from ipc_handoff.device_layout import AnswersWord
from ipc_handoff.flag_words import Answer
from ipc_handoff.kernels.launch import dependent_launch
from ipc_handoff.kernels.words import WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory

CURRENT = tl.constexpr(int(WorkerState.CURRENT))
ANSWERS = tl.constexpr(int(WorkerState.ANSWERS))
GIVEN_UP = tl.constexpr(int(AnswersWord.CANCELLED))
NO_ANSWER = tl.constexpr(int(Answer.NONE))
IS_ANSWERED = tl.constexpr(int(Answer.ANSWERED))
IS_CANCELLED = tl.constexpr(int(Answer.CANCELLED))


@triton.jit(do_not_specialize=("request", "answer"), do_not_specialize_on_alignment=("state",))
def flag_kernel(state, request: tl.int64, answer: tl.int64, PTX: tl.constexpr, PDL: tl.constexpr):
    """Ask for a layer of the running step; without one, let the wait behind pass. One program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    step = tl.load(state + CURRENT)
    if step != 0:
        # An answer to this request comes after it, and is not taken away by this.
        ring(answer, tl.full((), NO_ANSWER, tl.int64), PTX)
        ring(request, step, PTX)
        # A step that was given up before nobody will answer, and nobody will wake the stream.
        if look(line(tl.load(state + ANSWERS), GIVEN_UP), PTX) >= step:
            ring(answer, tl.full((), IS_CANCELLED, tl.int64), PTX)
    else:
        ring(answer, tl.full((), IS_ANSWERED, tl.int64), PTX)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def raise_flag(memory: WorkerMemory, request: int, answer: int) -> None:
    """Behind `stage`, on the current stream; can be captured.

    Args:
        request, answer: addresses of the layer's words, see `flag_words`.
    """
    dependent = dependent_launch(memory.device)
    flag_kernel[(1,)](
        memory.state, request, answer, PTX=memory.is_cuda, PDL=dependent, num_warps=1,
        launch_pdl=dependent,
    )  # fmt: skip
