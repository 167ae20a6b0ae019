"""Scores and selection in Triton: two kernels, whose work the rows' real lengths decide.

The scores of a paged batch are laid out by the real lengths (`mqa_logits.packed`), which only the
device knows. So a graph captured for the longest context costs, with short rows, what a graph
captured for short ones costs: windows of a batch that turns out to fit the first one are two
launches that return at once.
"""

from functools import partial

import torch
from torch import Tensor

from indexer_service.kernels.architecture import processors
from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.indexer import composed
from indexer_service.kernels.indexer.composed import OnStage
from indexer_service.kernels.indexer.windows import DEFAULT_WORKSPACE
from indexer_service.kernels.mqa_logits.packed import PADDING, PackedScores, padded, windows
from indexer_service.kernels.mqa_logits.paged_launch import paged_packed
from indexer_service.kernels.mqa_logits.ragged_launch import decoded_bytes, ragged
from indexer_service.kernels.nan_seen import NanSeen
from indexer_service.kernels.topk.launch import select, select_packed
from indexer_service.kernels.topk.plan import candidate_bytes

_BYTES_PER_SCORE = 4
_BYTES_PER_ROW = 16
"""Of row_at, row_end and arrived."""

_DECODED_PART = 4
"""Decoded keys and queries take this part of a workspace at most."""


def select_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    k: int,
    out: Tensor,
    workspace: int | None,
    enabled: Tensor | None,
    on_stage: OnStage,
    *,
    settled: bool,
    epilogue: Epilogue | None,
    impl: str,
    nan: NanSeen | None,
) -> None:
    """See `indexer.select_paged`; arguments are already checked, `impl` is Triton."""
    batch, next_n = q.shape[:2]
    limit = block_table.shape[1] * k_cache.shape[1]
    request = next_n * padded(limit)
    budget = DEFAULT_WORKSPACE if workspace is None else workspace
    room = _scores_that_fit(budget, batch * next_n, limit, k, q.device)
    if not limit or not batch or (batch > 1 and room < 2 * request) or room < request:
        composed.select_paged(
            q, k_cache, weights, seq_lens, block_table, k, out, workspace, enabled, on_stage,
            settled=settled, epilogue=epilogue, impl=impl, nan=nan,
        )  # fmt: skip
        return
    room = min(room, batch * request + PADDING)
    rows, device = batch * next_n, q.device
    packed = PackedScores(
        scores=torch.empty(room, dtype=torch.float32, device=device),
        row_at=torch.empty(rows, dtype=torch.int64, device=device),
        row_end=torch.empty(rows, dtype=torch.int32, device=device),
        arrived=torch.empty(rows, dtype=torch.int32, device=device),
    )
    last = windows(batch, next_n, limit, room) - 1
    for window in range(last + 1):
        paged_packed(
            q.view(torch.uint8), k_cache, weights, seq_lens, block_table, packed,
            limit=limit, window=window, enabled=enabled, settled=settled,
        )  # fmt: skip
        if on_stage:
            on_stage("logits")
        select_packed(
            packed.scores, packed.row_at, packed.row_end, packed.arrived, k, out,
            longest=limit, enabled=enabled, settled=settled,
            epilogue=epilogue if window == last else None, nan=nan,
        )  # fmt: skip
        if on_stage:
            on_stage("topk")


def select_ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    topk: int,
    out: Tensor,
    workspace: int | None,
    enabled: Tensor | None,
    on_stage: OnStage,
    *,
    impl: str,
    nan: NanSeen | None,
) -> None:
    """See `indexer.select_ragged`; arguments are already checked, `impl` is Triton."""
    rows, heads, dim = q.shape
    keys, width = len(k), padded(len(k))
    budget = DEFAULT_WORKSPACE if workspace is None else workspace
    # Below SM89, what is decoded takes a part of it.
    logits = partial(ragged, workspace=budget // _DECODED_PART)
    budget -= decoded_bytes(rows, heads, dim, keys, q.device, budget // _DECODED_PART)
    at_once = _scores_that_fit(budget, rows, keys, topk, q.device) // max(width, 1)
    if not rows or not keys or not at_once:
        composed.select_ragged(
            q, k, k_scale, weights, row_start, row_end, topk, out, max(budget, 1), enabled,
            on_stage, impl=impl, logits=logits, nan=nan,
        )  # fmt: skip
        return
    # Few large blocks: the keys are read again for each, and top-k streams at the memory's rate.
    blocks = -(-rows // at_once)
    at_once = -(-rows // blocks)
    scores = torch.empty((at_once, width), dtype=torch.float32, device=q.device)[:, :keys]
    for first in range(0, rows, at_once):
        some = slice(first, min(first + at_once, rows))
        block = scores[: some.stop - first]
        start, end = row_start[some], row_end[some]
        logits(
            q[some].view(torch.uint8), k.view(torch.uint8), k_scale, weights[some], start, end,
            block, fill=False, enabled=enabled,
        )  # fmt: skip
        if on_stage:
            on_stage("logits")
        seen = None if nan is None else nan.behind(first)
        select(block, topk, start, end, out[some], enabled=enabled, nan=seen)
        if on_stage:
            on_stage("topk")


def _scores_that_fit(budget: int, rows: int, longest: int, k: int, device: torch.device) -> int:
    """Scores for which there is room beside what top-k needs for so many rows."""
    candidates = candidate_bytes(rows, longest, k, processors=processors(device))
    return max(0, budget - rows * _BYTES_PER_ROW - candidates) // _BYTES_PER_SCORE
