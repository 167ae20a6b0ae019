"""A layer that shares its indices attends to a selection of its own step, or to nothing."""

import triton
import triton.language as tl
from torch import Tensor

from ipc_handoff.kernels.found import Contradiction, tell_found
from ipc_handoff.kernels.launch import dependent_launch
from ipc_handoff.kernels.words import WorkerState
from ipc_handoff.kernels.worker_memory import WorkerMemory

SELECTED = tl.constexpr(int(WorkerState.SELECTED))
LEAK = tl.constexpr(int(Contradiction.SHARED_INDEX_LEAK))

_BLOCK = 2048


@triton.jit(
    do_not_specialize=("rows", "ordinal", "out_stride"),
    do_not_specialize_on_alignment=("state", "begun", "found", "entries", "out"),
)
def share_kernel(
    state, begun, found, entries, out, rows, ordinal, out_stride: tl.int64, K: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write -1 into `out`, int32 [rows, K], unless a layer has selected since the step began.

    begun: int64 [1], the step. found, entries: see `tell_found`. One program.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    selected = tl.load(state + SELECTED)
    step = tl.load(begun)
    if selected != step:
        for row in range(rows):
            for first in range(0, K, BLOCK):
                place = first + tl.arange(0, BLOCK)
                none = tl.full((BLOCK,), -1, tl.int32)
                tl.store(out + tl.cast(row, tl.int64) * out_stride + place, none, mask=place < K)
        tell_found(LEAK, step, ordinal, -1, -1, step, selected, found, entries, PTX)


def share(memory: WorkerMemory, out: Tensor, *, ordinal: int) -> None:
    """Look at what a layer shares, on the current stream; can be captured.

    Args:
        out: int32 [T, top_k], rows contiguous: the buffer that layers' selections are written to.
        ordinal: of the layer that selects, for people.
    """
    dependent = dependent_launch(memory.device)
    k = memory.geometry.top_k
    share_kernel[(1,)](
        memory.state, memory.begun, memory.found.count, memory.found.entries, out, len(out),
        ordinal, out.stride(0), K=k, BLOCK=min(_BLOCK, triton.next_power_of_2(k)),
        PTX=memory.is_cuda, PDL=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
