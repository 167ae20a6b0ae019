"""What must be right before anything is timed: scores against float64, selections as sets."""

import torch
from indexer_inputs import Decode, Prefill
from torch import Tensor

from indexer_service.kernels import mqa_logits, topk

TOLERANCE = 5e-4
"""Of scores, relative in norm."""


def sampled(rows: int) -> list[int]:
    """Numbers that are compared with float64: the first, the last and two between."""
    return sorted({0, rows // 3, 2 * rows // 3, rows - 1})


def rows_of(requests: list[int], next_n: int) -> list[int]:
    """The rows of these requests."""
    return [request * next_n + row for request in requests for row in range(next_n)]


def exact_paged(inputs: Decode, requests: list[int]) -> Tensor:
    """float64 scores, rounded once, of these requests' rows: fp32 [rows, context]."""
    q, k_cache, weights, lengths, table = inputs.arguments(0)
    return mqa_logits.paged(
        q[requests], k_cache, weights[rows_of(requests, inputs.next_n)], lengths[requests],
        table[requests], inputs.context, impl="reference",
    )  # fmt: skip


def exact_ragged(inputs: Prefill, rows: list[int]) -> Tensor:
    q, k, k_scale, weights, start, end = inputs.arguments()
    return mqa_logits.ragged(
        q[rows], k, k_scale, weights[rows], start[rows], end[rows], impl="reference"
    )


def score_error(scores: Tensor, exact: Tensor) -> float:
    """Relative in norm; infinite where the -inf of both are not in the same places."""
    hidden = exact == -torch.inf
    if not torch.equal(scores == -torch.inf, hidden):
        return float("inf")
    difference = (scores.double() - exact.double()).masked_fill(hidden, 0)
    return float(difference.norm() / exact.double().masked_fill(hidden, 0).norm())


def same_sets(chosen: Tensor, expected: Tensor) -> bool:
    """Whether both chose the same indices in every row, in whatever order."""
    return torch.equal(chosen.sort(1).values, expected.sort(1).values)


def overlap(chosen: Tensor, expected: Tensor) -> float:
    """The part of the expected indices that were chosen, over all rows."""
    common = 0
    for ours, theirs in zip(chosen, expected, strict=True):
        common += int(torch.isin(theirs[theirs >= 0], ours).sum())
    return common / max(int((expected >= 0).sum()), 1)


def selection(scores: Tensor, k: int, end: Tensor | None = None) -> Tensor:
    """What `topk.select` promises of these scores, by plain torch."""
    return topk.select(scores, k, row_end=end, impl="reference")
