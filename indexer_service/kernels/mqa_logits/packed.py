"""Scores of a batch laid out by the rows' real lengths: what logits and top-k hand each other.

A request takes `next_n` rows of `padded(length)` scores, the length of its longest row; the
requests' rows follow each other without a gap. The device computes the places, so that a batch
that is far shorter than agreed needs far less memory and far less work, also in a captured graph.

A batch that may not fit goes through in windows of `span(...)` scores: a window holds the requests
whose first score lies in it, placed relative to its beginning. The rest of the memory is room for
the last request's rows.
"""

from dataclasses import dataclass

from torch import Tensor

PADDING = 128
"""Rows take a multiple of so many scores. A kernel's tile of keys divides it."""


@dataclass(frozen=True)
class PackedScores:
    """Attributes:
    scores: fp32 [S]; what lies past a row's end means nothing.
    row_at: int64 [R], the place of each row's first score; -1 if another window holds the row.
    row_end: int32 [R], how many scores the row has.
    arrived: int32 [R], set to 0 by the logits: for the top-k's programs to count themselves.
    """

    scores: Tensor
    row_at: Tensor
    row_end: Tensor
    arrived: Tensor


def padded(length: int) -> int:
    """Scores that a row of this length takes."""
    return -(-length // PADDING) * PADDING


def span(scores: int, next_n: int, limit: int) -> int:
    """Scores from one window's beginning to the next's, in memory for so many scores.

    Args:
        limit: no row is longer.
    """
    return max(scores - next_n * padded(limit), 1)


def windows(batch: int, next_n: int, limit: int, scores: int) -> int:
    """Windows that hold any batch of so many requests.

    Args:
        scores: room for two requests (for one, if there is only one).
    """
    last_begins_at_most = max(batch - 1, 0) * next_n * padded(limit)
    return last_begins_at_most // span(scores, next_n, limit) + 1
