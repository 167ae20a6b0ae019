"""Comparing selections, also with an engine whose scores are rounded differently."""

import torch

# What DeepGEMM's scores may differ from exact ones by, relative in norm.
SCORE_TOLERANCE = 5e-4


def same_rows(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """bool [rows]: which rows of int32 [rows, k] selections, both ascending, are the same set."""
    return (found == expected).all(dim=1)


def indistinguishable_rows(
    found: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """bool [rows]: which rows differ only in keys that the other engine's scores cannot order.

    Two scores closer than the tolerance may stand in either order; so a key that one side chose
    and the other did not must score that near the last chosen one, and as many keys must be
    chosen.

    Args:
        scores: float32 [rows, keys], the other engine's, -inf outside the row; a selection's
            index is a column.
    """
    rows = []
    for mine, theirs, row in zip(found, expected, scores, strict=True):
        chosen, wanted = set(mine[mine >= 0].tolist()), set(theirs[theirs >= 0].tolist())
        disputed = row[sorted(chosen ^ wanted)]
        finite = row[row.isfinite()]
        allowed = SCORE_TOLERANCE * finite.square().mean().sqrt()
        boundary = row[sorted(wanted)].min()
        near = bool(((disputed - boundary).abs() <= allowed).all())
        rows.append(len(chosen) == len(wanted) and near)
    return torch.tensor(rows)
