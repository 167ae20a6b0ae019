"""Selection over windows of keys, merged exactly, within a budget of memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from indexer_service.kernels import topk
from indexer_service.kernels.checks import positive

DEFAULT_WORKSPACE = 256 << 20
"""Bytes of temporaries where the caller names no budget."""

_BYTES_PER_SCORE = 4
_BYTES_PER_CANDIDATE = 64
"""Scores, indices and positions of what is kept, 32 and 64 bit, of this window and the last."""

BytesBeside = Callable[[int, int], int]
"""Memory that top-k takes for so many rows of so many columns, besides the scores."""


def reference_bytes(rows: int, columns: int) -> int:
    """Of the reference: its masked copy (4), its running count (4) and four masks (1 each)."""
    return 12 * rows * columns


@dataclass(frozen=True)
class Windows:
    """How the work is cut: `units` requests or rows at a time, `keys` keys at a time."""

    units: int
    keys: int


def plan_windows(
    units: int,
    rows_per_unit: int,
    width: int,
    k: int,
    workspace: int | None,
    *,
    step: int,
    beside: BytesBeside = reference_bytes,
) -> Windows:
    """Cuts by rows first (each key is then read once a block of rows), by keys if one is too big.

    Args:
        units: requests (or rows) in all, each of `rows_per_unit` rows.
        width: keys of the longest row; k: candidates kept a row.
        workspace: bytes that the temporaries of one window may take together (None: 256 MiB).
        step: a window is a multiple of so many keys, and at least that, whatever the budget.
        beside: what top-k takes.

    Raises:
        ValueError: workspace < 1.
    """
    workspace = DEFAULT_WORKSPACE if workspace is None else positive("workspace", workspace)

    def fits(units: int, keys: int) -> bool:
        rows, columns = units * rows_per_unit, keys + k
        own = rows * (columns * _BYTES_PER_SCORE + k * _BYTES_PER_CANDIDATE)
        return own + beside(rows, columns) <= workspace

    units, keys = max(units, 1), max(width, 1)
    while units > 1 and not fits(units, keys):
        units = -(-units // 2)
    while keys > step and not fits(units, keys):
        keys = max(-(-keys // 2) // step, 1) * step
    return Windows(units, keys)


def merge_windows(
    score: Callable[[int, int, Tensor], None],
    keys: tuple[int, int],
    window: int,
    k: int,
    out: Tensor,
    *,
    impl: str,
    on_stage: Callable[[str], None] | None,
) -> None:
    """The k best of keys[0] <= s < keys[1] for a block of rows, at most `window` keys at a time.

    What was kept so far stands in front of the next window's scores, with its scores unchanged
    and its indices ascending and lower than the window's. So the order of columns is the order
    of indices, one `topk.select` over both keeps the right ones, and ties fall as they would
    over all keys at once.

    Args:
        score: `score(begin, end, scores)` writes the scores of those keys into fp32
            [rows, end - begin], -inf where a row does not see the key.
        out: int32 [rows, k], written whole: key numbers, ascending, -1 at the tail.
    """
    first, last = keys
    out.fill_(-1)
    window = min(window, last - first)
    if window <= 0:
        return
    buffer = torch.empty((len(out), k + window), dtype=torch.float32, device=out.device)
    for begin in range(first, last, window):
        end = min(begin + window, last)
        kept = k if begin > first else 0
        columns = buffer[:, k - kept : k + end - begin]
        score(begin, end, columns[:, kept:])
        if on_stage:
            on_stage("logits")
        place = topk.select(columns, k, impl=impl)
        none = place < 0
        if end < last:
            best = columns.gather(1, place.clamp_min(0).to(torch.int64))
            buffer[:, :k] = best.masked_fill_(none, -torch.inf)
        chosen = place + (begin - kept)
        if kept:
            earlier = out.gather(1, place.clamp(0, k - 1).to(torch.int64))
            chosen = torch.where(place < kept, earlier, chosen)
        out.copy_(chosen.masked_fill_(none, -1))
        if on_stage:
            on_stage("topk")
