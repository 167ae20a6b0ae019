"""What `topk.select` means, in plain torch."""

import torch
from torch import Tensor


def select(
    scores: Tensor, k: int, row_start: Tensor | None, row_end: Tensor | None, out: Tensor
) -> None:
    """See `topk.select`; arguments are already checked.

    The k-th largest score is the threshold: all above it are chosen, and of those equal to it as
    many as are missing, from the left. What is chosen is then read off in order of its index.
    """
    rows, width = scores.shape
    out.fill_(-1)
    count = min(k, width)
    if rows == 0 or count == 0:
        return
    eligible = scores > -torch.inf  # False for NaN too
    if row_start is not None or row_end is not None:
        column = torch.arange(width, dtype=torch.int32, device=scores.device)
        if row_start is not None:
            eligible &= column >= row_start.unsqueeze(1)
        if row_end is not None:
            eligible &= column < row_end.unsqueeze(1)
    ranked = torch.where(eligible, scores, -torch.inf)
    threshold = ranked.topk(count, sorted=False).values.amin(1, keepdim=True)
    above = ranked > threshold
    equal = (ranked == threshold) & eligible  # nothing where the threshold is -inf
    missing = count - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))

    row, column = chosen.nonzero(as_tuple=True)  # by row, then by column
    per_row = chosen.sum(1)
    first = per_row.cumsum(0) - per_row
    place = torch.arange(len(row), device=scores.device) - first[row]
    relative = column if row_start is None else column - row_start[row]
    out[row, place] = relative.to(torch.int32)
