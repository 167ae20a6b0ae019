"""Behind a wait, in one launch: the answer is handed back, or else the layer is computed here."""

import triton
import triton.language as tl

from indexer_service.kernels.architecture import architecture
from indexer_service.kernels.indexer.rescue import (
    POINTERS,
    UNSPECIALISED,
    RescueInputs,
    rescue_request,
)
from ipc_handoff.kernels.hand_back import BLOCK, hand_rows_back
from ipc_handoff.kernels.launch import INDEX_BYTES, dependent_launch, together
from ipc_handoff.kernels.worker_memory import WorkerMemory

_SM120, _REGISTERS = 120, 168


@triton.jit(
    do_not_specialize=(*UNSPECIALISED, "ordinal"),
    do_not_specialize_on_alignment=(*POINTERS, "state", "decision", "found", "entries"),
)
def answer_or_rescue_kernel(
    state, decision, found, entries, ordinal, q, cache, weights, seq_lens, table, scores, enabled,
    out, heads, pages, limit, page_stride: tl.int64, weight_row: tl.int64, weight_head: tl.int64,
    table_row: tl.int64, table_column: tl.int64, score_row: tl.int64, k, out_stride: tl.int64,
    NEXT_N: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, NATIVE: tl.constexpr,
    ASSEMBLY: tl.constexpr, K: tl.constexpr, BACK: tl.constexpr, VECTOR: tl.constexpr,
    CHECKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `hand_back_kernel` for the rows of a request, by program (0, request), and then as
    `rescue_kernel`: one of the two writes nothing.

    BACK: indices that are handed back at a time.
    """
    request = tl.cast(tl.program_id(1), tl.int64)
    hand_rows_back(
        state, decision, found, entries, out, request * NEXT_N, (request + 1) * NEXT_N, ordinal,
        out_stride, NEXT_N, K, BACK, VECTOR, CHECKED, ASSEMBLY, PDL,
    )  # fmt: skip
    if tl.load(enabled) == 0:
        return
    rescue_request(
        request, q, cache, weights, seq_lens, table, scores, out, heads, pages, limit,
        page_stride, weight_row, weight_head, table_row, table_column, score_row, k, out_stride,
        NEXT_N, ROWS, GROUPS, HEADS, D, PAGE, PADDED, BLOCK_N, STAGES, BLOCK, ALIGN, NATIVE,
        ASSEMBLY,
    )  # fmt: skip


def answer_or_rescue(memory: WorkerMemory, inputs: RescueInputs, *, ordinal: int) -> None:
    """Write a decode layer's answer into `out`, or what `rescue` computes; can be captured.

    Args:
        inputs: of which `enabled` is the memory's `rescued`, and `out` has the requests' rows and
            no others.
    """
    dependent = dependent_launch(memory.device)
    k, out = memory.geometry.top_k, inputs.out
    answer_or_rescue_kernel[(1, len(inputs.q))](
        memory.state, memory.decision, memory.found.count, memory.found.entries, ordinal,
        **inputs.arguments(), K=k,
        BACK=min(BLOCK, triton.next_power_of_2(k)),
        VECTOR=together(out.data_ptr(), out.stride(0) * INDEX_BYTES, k * INDEX_BYTES),
        CHECKED=memory.checks_generations, PDL=dependent, launch_pdl=dependent,
        maxnreg=most_registers(architecture(memory.device)),
    )  # fmt: skip


def most_registers(arch: int) -> int | None:
    """Of a thread. Left to itself the compiler takes fewer on SM120 than are needed, and spills."""
    return _REGISTERS if arch >= _SM120 else None
