"""Exact, deterministic selection of the k largest scores of each row."""

import torch
from torch import Tensor

from indexer_service.kernels.checks import expect, expect_rows, positive
from indexer_service.kernels.dispatch import Operation

__all__ = ["implementation", "select"]

_select = Operation(
    "topk.select",
    reference="indexer_service.kernels.topk.reference:select",
    triton="indexer_service.kernels.topk.launch:select",
)


def select(
    scores: Tensor,
    k: int,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """The indices of the k largest scores of each row, in ascending order.

    The set is exact. Of equal scores the lowest index wins; -0.0 equals +0.0. NaN and -inf are
    never chosen, +inf is. A row with fewer than k scores that may be chosen gives them all, then
    -1. The same scores give the same bits on every run, whatever other rows there are.

    Args:
        scores: fp32 [rows, width], rows contiguous.
        k: how many; may be more than the width.
        row_start, row_end: int32 [rows], the columns row_start <= c < row_end that take part
            (None: from the first, to the last). Bounds outside the row are cut to it; an empty
            or reversed range gives only -1.
        out: int32 [rows, k] with contiguous rows, written whole.
        impl: "auto", "reference" or "triton".

    Returns:
        int32 [rows, k], relative to row_start, padded with -1 at the tail.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or k < 1.
    """
    expect("scores", scores, "[rows, width]", (None, None), torch.float32)
    rows, device = len(scores), scores.device
    expect_rows("scores", scores, "[rows, width]", scores.shape, torch.float32, device)
    positive("k", k)
    for name, bound in (("row_start", row_start), ("row_end", row_end)):
        if bound is not None:
            expect(name, bound, "[rows]", (rows,), torch.int32, device)
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=device)
    expect_rows("out", out, "[rows, k]", (rows, k), torch.int32, device)
    _select.implementation(impl, device)(scores, k, row_start, row_end, out)
    return out


def implementation(impl: str, device: torch.device) -> str:
    """The name of what `select` runs for this `impl`.

    Raises:
        ValueError: there is none.
    """
    return _select.chosen(impl, device)
