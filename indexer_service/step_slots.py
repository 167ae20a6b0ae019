"""Pinned memory of the steps in flight: each has a slot from its plan's copy to its report."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from indexer_service.kernels.device_inputs import FAULT_WORDS, faults_of
from indexer_service.kernels.nan_seen import row_of
from indexer_service.kernels.step import RowFault
from indexer_service.step_kernels import RESULT_HEAD, nan_words
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.words import Live


class StepEnd(NamedTuple):
    """Attributes:
    is_live: it was wanted to its end; otherwise `reason` is a `GateEnd`.
    answered: layers that were. seen: what a slot held, where that is the reason.
    """

    is_live: bool
    reason: int
    answered: int
    seen: Generation


@dataclass(frozen=True)
class StepSlot:
    """Attributes:
    plan: int32, as `StepKernels.plan`; result: int32, as `StepKernels.result`.
    layers: of the session.
    stamps: int64, a step's block of stamps.
    """

    plan: Tensor
    result: Tensor
    stamps: Tensor
    layers: int

    @property
    def end(self) -> StepEnd:
        """What the words of `Live` say."""
        live = self.result[nan_words(self.layers) :][: len(Live)]
        words = live.tolist()
        (seen,) = live[Live.SEEN : Live.SEEN + 2].view(torch.int64).tolist()
        return StepEnd(
            bool(words[Live.LIVE]), words[Live.REASON], words[Live.ANSWERED], Generation.of(seen)
        )

    @property
    def nan_rows(self) -> list[int | None]:
        """The first row of each of the session's layers whose scores hold NaN."""
        return [row_of(word) for word in self.result[: self.layers].tolist()]

    def faults(self, requests: int) -> list[RowFault]:
        """Of the step's requests."""
        begin = nan_words(self.layers) + RESULT_HEAD
        words = self.result[begin : begin + FAULT_WORDS * requests]
        return faults_of(words.view(requests, FAULT_WORDS).tolist())


class StepSlots:
    """Slots are given out and come back: none is written while the device may still use it."""

    def __init__(self, slots: Sequence[StepSlot]) -> None:
        self._free = deque(slots)

    def take(self) -> StepSlot:
        """One that nothing uses.

        Raises:
            IndexError: all are in flight; the caller had more steps in flight than there are.
        """
        return self._free.popleft()

    def give_back(self, slot: StepSlot) -> None:
        self._free.append(slot)
