"""`select_paged` by one program a request: one small launch, for what is hardly ever needed.

A captured graph holds it behind every wait, where two large kernels that return at once would
cost more than the wait itself. It runs when an answer did not come: once, and then slowly.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.architecture import HOPPER, architecture, native_fp8
from indexer_service.kernels.k_cache.layout import SCALE_BYTES, alignment
from indexer_service.kernels.mqa_logits import paged_plan
from indexer_service.kernels.mqa_logits.packed import PADDING, padded
from indexer_service.kernels.mqa_logits.paged_portable import portable_kernel
from indexer_service.kernels.mqa_logits.paged_share import row_length
from indexer_service.kernels.topk.memory import select_from_memory

_BLOCK_KEYS = 64
_STAGES = 2
_WARPS = 4
_LIST_BLOCK = 2048
"""Scores that are looked at together."""


@triton.jit
def rescue_request(
    request, q, cache, weights, seq_lens, table, scores, out, heads, pages, limit, page_stride,
    weight_row, weight_head, table_row, table_column, score_row, k, out_stride,
    NEXT_N: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, NATIVE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Scores of a request's rows, and the k largest of each, by program (0, request)."""
    row = request * NEXT_N
    portable_kernel(
        q + row * heads * D, cache, weights + row * weight_row, seq_lens + request,
        table + request * table_row, scores + row * score_row, None, None, None, None, 1, heads,
        pages, limit, 0, 0, page_stride, weight_row, weight_head, 0, 0, 1, 0, table_column,
        score_row, NEXT_N, 1, ROWS, GROUPS, HEADS, D, PAGE, PADDED, 1, BLOCK_N, STAGES, ALIGN,
        NATIVE, ASSEMBLY, False, False,
    )  # fmt: skip
    tl.debug_barrier()
    for j in range(NEXT_N):
        length = row_length(seq_lens + request, 0, j, True, 0, 0, 1, limit, NEXT_N)
        select_from_memory(
            scores + (row + j) * score_row, seq_lens, 1, length, 0, False, k, 0,
            out + (row + j) * out_stride, BLOCK,
        )  # fmt: skip


UNSPECIALISED = (
    "heads", "pages", "limit", "page_stride", "weight_row", "weight_head", "table_row",
    "table_column", "score_row", "k", "out_stride",
)  # fmt: skip
"""Numbers whose values must not make new kernels."""

POINTERS = ("cache", "weights", "seq_lens", "table", "enabled", "out")
"""Pointers whose alignment must not."""


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=POINTERS)
def rescue_kernel(
    q, cache, weights, seq_lens, table, scores, enabled, out, heads, pages, limit,
    page_stride: tl.int64, weight_row: tl.int64, weight_head: tl.int64, table_row: tl.int64,
    table_column: tl.int64, score_row: tl.int64, k, out_stride: tl.int64, NEXT_N: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, NATIVE: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Scores of a request's rows, and the k largest of each, by program (0, request).

    q: bytes [requests, NEXT_N, heads, D], contiguous. seq_lens: int32 [requests]. scores: fp32, a
    row each score_row. enabled: int32 [1], 0: do nothing.
    """
    if PDL:
        # Who comes next waits for this kernel's end: launched now, it is there by then.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.load(enabled) == 0:
        return
    rescue_request(
        tl.cast(tl.program_id(1), tl.int64), q, cache, weights, seq_lens, table, scores, out,
        heads, pages, limit, page_stride, weight_row, weight_head, table_row, table_column,
        score_row, k, out_stride, NEXT_N, ROWS, GROUPS, HEADS, D, PAGE, PADDED, BLOCK_N, STAGES,
        BLOCK, ALIGN, NATIVE, ASSEMBLY,
    )  # fmt: skip


def rescue_bytes(rows: int, longest: int) -> int:
    """Memory that `rescue` takes for its time."""
    return rows * padded(longest) * torch.float32.itemsize


@dataclass(frozen=True)
class RescueInputs:
    """As `indexer.select_paged` takes them; all on the GPU, and q contiguous.

    Attributes:
        q: e4m3 [requests, next_n, heads, D] (or bytes); weights: fp32 [requests * next_n, heads].
        k_cache: uint8 [pages, page, D+4].
        seq_lens: int32 [requests]; block_table: int32 [requests, n].
        k: how many keys a row.
        out: int32 [requests * next_n, k], rows contiguous.
        enabled: int32 [1]; with 0 in it nothing is done.
    """

    q: Tensor
    k_cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor
    k: int
    out: Tensor
    enabled: Tensor

    def arguments(self) -> dict[str, Any]:
        """What a kernel that calls `rescue_request` is launched with; takes the scores' memory."""
        q, k_cache, weights, table = self.q, self.k_cache, self.weights, self.block_table
        requests, next_n, heads, dim = q.shape
        columns = paged_plan.columns(heads, next_n)
        limit = table.shape[1] * k_cache.shape[1]
        shape = (requests * next_n, padded(limit))
        scores = torch.empty(shape, dtype=torch.float32, device=q.device)
        return dict(
            q=q.view(torch.uint8), cache=k_cache, weights=weights, seq_lens=self.seq_lens,
            table=table, scores=scores, enabled=self.enabled, out=self.out, heads=heads,
            pages=len(k_cache), limit=limit, page_stride=k_cache.stride(0),
            weight_row=weights.stride(0), weight_head=weights.stride(1),
            table_row=table.stride(0), table_column=table.stride(1),
            score_row=scores.stride(0), k=self.k, out_stride=self.out.stride(0), NEXT_N=next_n,
            ROWS=columns.rows, GROUPS=columns.groups, HEADS=columns.heads, D=dim,
            PAGE=k_cache.shape[1], PADDED=PADDING, BLOCK_N=_BLOCK_KEYS, STAGES=_STAGES,
            BLOCK=_LIST_BLOCK, ALIGN=max(alignment(k_cache), SCALE_BYTES),
            NATIVE=native_fp8(architecture(q.device)), ASSEMBLY=q.device.type == "cuda",
            num_warps=_WARPS,
        )  # fmt: skip


def rescue(inputs: RescueInputs) -> None:
    """Writes what `indexer.select_paged` would, the same bits, if `enabled`.

    A request is computed by one program: milliseconds where select_paged takes microseconds, and
    less than one when it is not enabled. Can be captured; takes `rescue_bytes` of memory.
    """
    device = inputs.q.device
    dependent = device.type == "cuda" and architecture(device) >= HOPPER
    rescue_kernel[(1, len(inputs.q))](**inputs.arguments(), PDL=dependent, launch_pdl=dependent)
