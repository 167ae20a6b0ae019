"""Scores in windows of bounded memory, each then selected from: any logits with any top-k."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits, topk
from indexer_service.kernels.architecture import processors
from indexer_service.kernels.dispatch import AUTO, REFERENCE, TRITON
from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.indexer.windows import (
    BytesBeside,
    merge_windows,
    plan_windows,
    reference_bytes,
)
from indexer_service.kernels.lengths import row_lengths
from indexer_service.kernels.nan_seen import NanSeen
from indexer_service.kernels.topk.plan import candidate_bytes

OnStage = Callable[[str], None] | None

_BOTH = (AUTO, TRITON, REFERENCE)
"""Implementations of logits and of top-k; with others, top-k is what "auto" means."""

_SMALLEST_WINDOW = 64
"""Keys of a ragged window at the least: one page of the usual cache."""


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
    nan_rows: Tensor | None = None,
    nan: NanSeen | None = None,
) -> None:
    """See `indexer.select_paged`; arguments are already checked. `settled` saves nothing here."""
    answer = _private(enabled, out)
    if answer is None:
        return
    batch, next_n = q.shape[:2]
    page = k_cache.shape[1]
    lengths = row_lengths(seq_lens, next_n)
    width = _longest(lengths, block_table.shape[1] * page)
    beside = _bytes_beside(impl, q.device, k)
    plan = plan_windows(batch, next_n, width, k, workspace, step=page, beside=beside)

    for first in range(0, batch, plan.units):
        requests = slice(first, min(first + plan.units, batch))
        rows = slice(requests.start * next_n, requests.stop * next_n)
        block_lengths = lengths[requests]

        def score(
            begin: int,
            end: int,
            scores: Tensor,
            requests: slice = requests,
            rows: slice = rows,
            block_lengths: Tensor = block_lengths,
        ) -> None:
            pages = slice(begin // page, -(-end // page))
            mqa_logits.paged(
                q[requests], k_cache, weights[rows], block_lengths - begin,
                block_table[requests, pages], end - begin, out=scores, impl=impl,
            )  # fmt: skip
            _note_nan(nan_rows, nan, enabled, rows, scores)

        keys = (0, _longest(block_lengths, width))
        merge_windows(score, keys, plan.keys, k, answer[rows], impl=_top_k(impl), on_stage=on_stage)
    _hand_over(answer, enabled, out)
    if epilogue is not None:
        epilogue.alone()


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
    nan_rows: Tensor | None = None,
    nan: NanSeen | None = None,
    logits: Callable[..., None] | None = None,
) -> None:
    """See `indexer.select_ragged`; arguments are already checked.

    Args:
        logits: an implementation of `mqa_logits.ragged` to call instead of the one of `impl`.
    """
    if logits is None:
        logits = mqa_logits.ragged_function(impl, q)
    answer = _private(enabled, out)
    if answer is None:
        return
    q_codes, k_codes = q.view(torch.uint8), k.view(torch.uint8)
    beside = _bytes_beside(impl, q.device, topk)
    plan = plan_windows(len(q), 1, len(k), topk, workspace, step=_SMALLEST_WINDOW, beside=beside)
    for first in range(0, len(q), plan.units):
        rows = slice(first, min(first + plan.units, len(q)))
        start, end = row_start[rows], row_end[rows]

        def score(
            begin: int,
            finish: int,
            scores: Tensor,
            rows: slice = rows,
            start: Tensor = start,
            end: Tensor = end,
        ) -> None:
            keys = slice(begin, finish)
            logits(
                q_codes[rows], k_codes[keys], k_scale[keys], weights[rows], start - begin,
                end - begin, scores,
            )  # fmt: skip
            _note_nan(nan_rows, nan, enabled, rows, scores)

        chosen = answer[rows]
        keys = _key_range(start, end, len(k))
        merge_windows(score, keys, plan.keys, topk, chosen, impl=_top_k(impl), on_stage=on_stage)
        chosen -= torch.where(chosen >= 0, start.unsqueeze(1), 0)
    _hand_over(answer, enabled, out)


def _note_nan(
    nan_rows: Tensor | None,
    nan: NanSeen | None,
    enabled: Tensor | None,
    rows: slice,
    scores: Tensor,
) -> None:
    """The largest of a row's scores is NaN if one of them is: a single pass over them."""
    if nan_rows is None and nan is None:
        return
    found = scores.amax(1).isnan()
    if nan_rows is not None:
        nan_rows[rows] |= found
    if nan is not None:
        # On a GPU what is not enabled is scored all the same, see `_private`.
        nan.behind(rows.start).note(found if enabled is None else found & (enabled != 0))


def _top_k(impl: str) -> str:
    return impl if impl in _BOTH else AUTO


def _bytes_beside(impl: str, device: torch.device, k: int) -> BytesBeside:
    """What top-k will take besides the scores."""
    if topk.implementation(_top_k(impl), device) != TRITON:
        return reference_bytes
    return partial(candidate_bytes, k=k, processors=processors(device))


def _private(enabled: Tensor | None, out: Tensor) -> Tensor | None:
    """Where the answer goes while it is made; None if it is not wanted.

    The host reads `enabled` on a CPU only: on a GPU it would have to wait for it. There the answer
    is made out of sight, since somebody may use what `out` holds.
    """
    if enabled is None:
        return out
    if enabled.device.type != "cpu":
        return torch.empty_like(out, memory_format=torch.contiguous_format)
    return out if int(enabled) else None


def _hand_over(answer: Tensor, enabled: Tensor | None, out: Tensor) -> None:
    """With 0 in `enabled`, `out` is given what it holds."""
    if enabled is not None and answer is not out:
        torch.where(enabled != 0, answer, out, out=out)


def _longest(lengths: Tensor, limit: int) -> int:
    """Keys that some row sees. Only read on a CPU: elsewhere it would wait for the device."""
    if lengths.device.type != "cpu" or lengths.numel() == 0:
        return limit
    return min(max(int(lengths.max()), 0), limit)


def _key_range(start: Tensor, end: Tensor, limit: int) -> tuple[int, int]:
    """First and last key that some row sees; read on a CPU only, as in `_longest`."""
    if start.device.type != "cpu":
        return 0, limit
    return min(max(int(start.min()), 0), limit), _longest(end, limit)
