"""Where the words and slots of a bank in device memory lie.

`staging` is read by the service and `answers` by the worker, so each lies on its reader's GPU: a
word is polled where it is, and crosses a link once, when it is written. Both begin with the words
that their writer rings; the slots of the host layout follow, then the service's stamps. In front of
each slot stands whose data it holds.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ipc_handoff.stages import SERVICE_STAGES
from ipc_handoff.words import WORD_BYTES

if TYPE_CHECKING:
    from ipc_handoff.layout import HandoffGeometry

DEVICE_LINE = 128
"""Bytes of an L2 line: words of different meaning never share one."""

DEVICE_STAMPED_STEPS = 64


class StagingWord(IntEnum):
    """Lines of the words that the worker writes; REQUESTS + ordinal is a layer's."""

    PUBLISHED = 0
    DETACHED = 1
    REQUESTS = 2


class AnswersWord(IntEnum):
    """Lines of the words that the service writes; DONES + ordinal is a layer's."""

    PROGRESS = 0
    CANCELLED = 1
    DONES = 2


class SlotLine(IntEnum):
    """Lines in front of a slot, counted back from its start: `Generation.word`s, as on the host.

    Written twice, but without a fence behind the first time: a writer that has only just begun
    may not be seen.
    """

    LAYER = -1
    """Of q and weights in staging, of the selection in answers."""
    INPUTS = -2
    """Of lengths and tables; in staging only."""


_STAGING_LINES, _ANSWERS_LINES = 2, 1
"""`SlotLine`s of a slot."""


@dataclass(frozen=True)
class DeviceLayout:
    """Bytes from the start of a region.

    Attributes:
        staging_slots, answers_slots: where slot 0 begins; further slots follow at `staging_stride`
            and `answers_stride`.
        q, weights, query_start, seq_lens, block_table: of a staging slot's areas, from its start.
        stamps: where the stamp ring begins in `answers`: DEVICE_STAMPED_STEPS blocks of
            `stamp_stride` bytes, each a generation word and then one word a layer and stage.
        staging_size, answers_size: of the regions.
    """

    staging_slots: int
    staging_stride: int
    q: int
    weights: int
    query_start: int
    seq_lens: int
    block_table: int
    staging_size: int
    answers_slots: int
    answers_stride: int
    stamps: int
    stamp_stride: int
    answers_size: int

    @classmethod
    def of(cls, geometry: "HandoffGeometry") -> "DeviceLayout":
        layers = len(geometry.layers)
        staging, answers = geometry.staging, geometry.answers
        staging_slots = (StagingWord.REQUESTS + layers + _STAGING_LINES) * DEVICE_LINE
        answers_slots = (AnswersWord.DONES + layers + _ANSWERS_LINES) * DEVICE_LINE
        staging_stride = _aligned(staging.slot_size) + _STAGING_LINES * DEVICE_LINE
        answers_stride = _aligned(answers.slot_size) + _ANSWERS_LINES * DEVICE_LINE
        stamps = answers_slots + answers_stride * answers.slots
        stamp_stride = _aligned(WORD_BYTES * (1 + layers * len(SERVICE_STAGES)))
        return cls(
            staging_slots=staging_slots,
            staging_stride=staging_stride,
            q=staging.areas["q"].offset,
            weights=staging.areas["weights"].offset,
            query_start=staging.areas["query_start"].offset,
            seq_lens=staging.areas["seq_lens"].offset,
            block_table=staging.areas["block_table"].offset,
            staging_size=staging_slots + staging_stride * staging.slots,
            answers_slots=answers_slots,
            answers_stride=answers_stride,
            stamps=stamps,
            stamp_stride=stamp_stride,
            answers_size=stamps + stamp_stride * DEVICE_STAMPED_STEPS,
        )

    def staging_at(self, slot: int) -> int:
        """Where a staging slot begins."""
        return self.staging_slots + slot * self.staging_stride

    def answers_at(self, slot: int) -> int:
        """Where an answer slot begins."""
        return self.answers_slots + slot * self.answers_stride


def _aligned(size: int) -> int:
    return -(-size // DEVICE_LINE) * DEVICE_LINE
