"""Positions and slots of a step against its lengths and table, in host memory.

They come from other buffers of the engine than the lengths do: where one of them was rewritten too
early, they contradict each other, also when the CPU knows only bounds.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer_client.inputs import StepInputs

Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]


class WrongRow(NamedTuple):
    """The first row of a request that contradicts it."""

    row: int
    request: int
    expected: int
    seen: int


class WrongRows(NamedTuple):
    """At most one row a request each."""

    positions: list[WrongRow]
    slots: list[WrongRow]


def wrong_rows(inputs: StepInputs, page_size: int) -> WrongRows:
    """Rows whose position is not the one of their length, or whose slot is not that of their
    position.

    Nothing is said of rows that hold no token (a length of 0: padding), of slots below 0 (nothing
    is written), and of offsets that are themselves wrong.
    """
    starts = inputs.query_start.numpy().astype(np.int64)
    counts = np.diff(starts)
    if inputs.positions is None or counts.min() < 1 or starts[0] or starts[-1] != inputs.rows:
        return WrongRows([], [])
    request = np.repeat(np.arange(inputs.requests), counts)
    lengths = inputs.seq_lens.numpy().astype(np.int64)
    positions = inputs.positions.numpy().astype(np.int64)[: inputs.rows]
    # Of a request's n rows the last one is its last token.
    expected = (lengths - starts[1:])[request] + np.arange(inputs.rows)
    holds_token = (lengths > 0)[request] & (expected >= 0)
    wrong = holds_token & (positions != expected)
    found = _firsts(wrong, request, expected, positions)
    if inputs.slots is None:
        return WrongRows(found, [])
    table = inputs.block_table.numpy()
    slots = inputs.slots.numpy().astype(np.int64)[: inputs.rows]
    column = expected // page_size
    checked = holds_token & ~wrong & (slots >= 0) & (column < table.shape[1])
    page = table[request, np.clip(column, 0, table.shape[1] - 1)].astype(np.int64)
    right = page * page_size + expected % page_size
    return WrongRows(found, _firsts(checked & (slots != right), request, right, slots))


def _firsts(wrong: Truths, request: Integers, expected: Integers, seen: Integers) -> list[WrongRow]:
    rows = np.flatnonzero(wrong)
    if not len(rows):
        return []
    _, first = np.unique(request[rows], return_index=True)
    return [
        WrongRow(int(row), int(request[row]), int(expected[row]), int(seen[row]))
        for row in rows[first]
    ]
