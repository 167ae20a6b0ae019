"""Positions and slots of a step's rows against its lengths and table, on a GPU.

They come from other buffers of the engine than the lengths do: where one of them was rewritten too
early, they contradict each other, also when the CPU knows only bounds.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

WRONG_POSITION, WRONG_SLOT = 6, 7
"""Behind the numbers of `device_inputs.REASONS`; what is computed does not depend on these."""

_POSITION = tl.constexpr(WRONG_POSITION)
_SLOT = tl.constexpr(WRONG_SLOT)


@dataclass(frozen=True)
class Told:
    """What a copy tells of a step besides what it copies, and whom.

    Attributes:
        positions, slots: int64 [T], of each row's token in its request, and where its key is
            written (below 0: nowhere), on the device; None: not looked at.
        function: a `@triton.jit` function, called as `function(number, step, -1, row, request,
            expected, seen, *arguments, PTX)` for the first contradiction of a request: its fault,
            else that of one of its rows.
        step: int64 [1] on the device.
        tells_faults: faults are told as well.
    """

    function: Any
    arguments: tuple[Any, ...]
    step: Tensor
    positions: Tensor | None = None
    slots: Tensor | None = None
    tells_faults: bool = True


@triton.jit
def first_wrong_row(
    begin, end, length, table, positions, slots, page_size, POSITIONS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first of a request's rows with another position than its length implies, or else another
    slot than its table and position imply: number (0: none), row, expected, seen.

    Of its n rows the last one is its last token. Rows before its first token, and slots below 0,
    hold none. table: the request's row, as it was copied.
    """
    number = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    expected = tl.full((), 0, tl.int64)
    seen = tl.full((), 0, tl.int64)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        right = tl.cast(length - end + row, tl.int64)
        inside = (row < end) & (right >= 0)
        if POSITIONS:
            found = tl.load(positions + row, mask=inside, other=0)
            wrong = inside & (found != right)
            at = tl.min(tl.where(wrong, row, end), 0)
            if (at < end) & (number == 0):
                number, first = tl.full((), _POSITION, tl.int32), at
                expected = tl.sum(tl.where(row == at, right, 0), 0)
                seen = tl.sum(tl.where(row == at, found, 0), 0)
        if SLOTS:
            found = tl.load(slots + row, mask=inside, other=-1)
            page = tl.load(table + right // page_size, mask=inside, other=0).to(tl.int64)
            right = page * page_size + right % page_size
            wrong = inside & (found >= 0) & (found != right)
            at = tl.min(tl.where(wrong, row, end), 0)
            if (at < end) & (number == 0):
                number, first = tl.full((), _SLOT, tl.int32), at
                expected = tl.sum(tl.where(row == at, right, 0), 0)
                seen = tl.sum(tl.where(row == at, found, 0), 0)
    return number, first, expected, seen
