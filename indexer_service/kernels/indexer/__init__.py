"""Scores and selection together, in windows of bounded memory: what callers use.

There is no implementation of its own: `impl` goes to `mqa_logits` and `topk`. The selection is
the same bits as over all scores at once, whatever the windows are (see `windows.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits
from indexer_service.kernels.checks import expect, expect_rows, positive
from indexer_service.kernels.indexer.windows import merge_windows, plan_windows
from indexer_service.kernels.lengths import row_lengths

__all__ = ["select_paged", "select_ragged"]

_SMALLEST_WINDOW = 64
"""Keys of a ragged window at the least: one page of the usual cache."""


def select_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    workspace: int | None = None,
    enabled: Tensor | None = None,
    impl: str = "auto",
    on_stage: Callable[[str], None] | None = None,
) -> Tensor:
    """The k best keys of each row in a paged cache; `topk.select` says which and in what order.

    Args:
        q, k_cache, weights, seq_lens, block_table: as `mqa_logits.paged` takes them.
        k: how many keys a row; may be more than it has.
        out: int32 [B*next_n, k] with contiguous rows, every element of it written.
        workspace: bytes that the temporaries of one window may take together (default 256 MiB).
            A budget below one page of keys for one request works with that. The reference's own
            tile (1 MiB) comes on top.
        enabled: int32 [1] on the tensors' device; with 0 in it nothing is computed and nothing
            written into `out`.
        impl: "auto" or "reference".
        on_stage: called with "logits" after each window's scores and with "topk" after its
            selection, in the caller's thread. What it raises abandons the selection and
            propagates; `out` may then hold anything.

    Returns:
        int32 [B*next_n, k], positions in the request, ascending, -1 at the tail; only -1 for
        rows of length <= 0.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or k or workspace < 1.
    """
    mqa_logits.check_paged(q, k_cache, weights, seq_lens, block_table)
    batch, next_n = q.shape[:2]
    out = _check_output(out, len(weights), k, q.device)
    if not _is_enabled(enabled, q.device):
        return out
    page = k_cache.shape[1]
    lengths = row_lengths(seq_lens, next_n)
    width = _longest(lengths, block_table.shape[1] * page)
    plan = plan_windows(batch, next_n, width, k, workspace, step=page)

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

        keys = (0, _longest(block_lengths, width))
        merge_windows(score, keys, plan.keys, k, out[rows], impl=impl, on_stage=on_stage)
    return out


def select_ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    topk: int,
    *,
    out: Tensor | None = None,
    workspace: int | None = None,
    enabled: Tensor | None = None,
    impl: str = "auto",
    on_stage: Callable[[str], None] | None = None,
) -> Tensor:
    """The `topk` best of each row's keys among gathered ones; as `select_paged` otherwise.

    Args:
        q, k, k_scale, weights, row_start, row_end: as `mqa_logits.ragged` takes them.
        topk: how many keys a row.
        out: int32 [M, topk] with contiguous rows, every element of it written.
        workspace, enabled, impl, on_stage: as for `select_paged`.

    Returns:
        int32 [M, topk], relative to row_start, ascending, -1 at the tail.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or topk or workspace < 1.
    """
    mqa_logits.check_ragged(q, k, k_scale, weights, row_start, row_end)
    out = _check_output(out, len(q), topk, q.device, name="topk")
    if not _is_enabled(enabled, q.device):
        return out
    plan = plan_windows(len(q), 1, len(k), topk, workspace, step=_SMALLEST_WINDOW)
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
            mqa_logits.ragged(
                q[rows], k[keys], k_scale[keys], weights[rows], start - begin, end - begin,
                out=scores, impl=impl,
            )  # fmt: skip

        chosen = out[rows]
        keys = _key_range(start, end, len(k))
        merge_windows(score, keys, plan.keys, topk, chosen, impl=impl, on_stage=on_stage)
        chosen -= torch.where(chosen >= 0, start.unsqueeze(1), 0)
    return out


def _check_output(
    out: Tensor | None, rows: int, k: int, device: torch.device, name: str = "k"
) -> Tensor:
    shape = (rows, positive(name, k))
    if out is None:
        return torch.full(shape, -1, dtype=torch.int32, device=device)
    return expect_rows("out", out, f"[rows, {name}]", shape, torch.int32, device)


def _is_enabled(enabled: Tensor | None, device: torch.device) -> bool:
    if enabled is None:
        return True
    return bool(expect("enabled", enabled, "[1]", (1,), torch.int32, device).item())


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
