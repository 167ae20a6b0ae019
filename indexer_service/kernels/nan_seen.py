"""Where a selection notes that scores were NaN, without a word to the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class NanSeen:
    """Of a layer of a step.

    Attributes:
        word: int32 [1], 0 before the first row is scored; see `row_of`.
        first_row: of the call, in the step.
    """

    word: Tensor
    first_row: int = 0

    @property
    def mark(self) -> int:
        """What the word is at least if the call's row 0 holds NaN; one less for each row behind."""
        return _MOST - self.first_row

    def behind(self, rows: int) -> "NanSeen":
        """For a call that begins so many rows further on."""
        return NanSeen(self.word, self.first_row + rows)

    def note(self, rows: Tensor) -> None:
        """Note the rows that are True: bool [rows], on the word's device; never waits."""
        marks = torch.arange(
            self.mark, self.mark - len(rows), -1, dtype=torch.int32, device=rows.device
        )
        found = torch.where(rows, marks, 0).amax(0, keepdim=True)
        torch.maximum(self.word, found, out=self.word)


def row_of(word: int) -> int | None:
    """The first row that held NaN, of what a word became; None: none did."""
    return _MOST - word if word else None
