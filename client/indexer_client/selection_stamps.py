"""Whose selection each of the caller's index buffers holds: layers that share must find their own.

A buffer is known by its address: engines keep one for all layers, or a few.
"""

from typing import NamedTuple

from torch import Tensor

_REMEMBERED = 256


class Selection(NamedTuple):
    """layer: id of the layer that selected."""

    step: int
    layer: int


class SelectionStamps:
    """Of one session; its step thread alone uses it."""

    def __init__(self) -> None:
        self._selections: dict[int, Selection] = {}

    def stamp(self, buffer: Tensor, selection: Selection) -> None:
        """`buffer` now holds this selection."""
        if len(self._selections) >= _REMEMBERED:
            self._selections.clear()
        self._selections[buffer.data_ptr()] = selection

    def of(self, buffer: Tensor) -> Selection | None:
        """What it holds; None: nothing that was handed back."""
        return self._selections.get(buffer.data_ptr())
