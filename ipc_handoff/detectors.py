"""Which detectors are on (a setting of both sides, by name), and whom they tell."""

from dataclasses import dataclass
from enum import StrEnum

from ipc_handoff.findings import FindingListener, Findings

ALL, NONE = "all", "none"


class Detector(StrEnum):
    """What can be switched off by itself."""

    INPUTS = "inputs"
    """Tells of lengths, offsets and pages that the guard of inputs did not trust. The guard is
    always on: it is what keeps accesses inside."""
    POSITIONS = "positions"
    """Positions against lengths, slots against table and position, where the engine gives them."""
    GENERATIONS = "generations"
    """Every shared slot says whose it is: read before written, overwritten, stale."""
    WAITS = "waits"
    """Waits and gates that end without what they waited for."""
    SHARED_INDICES = "shared_indices"
    """Selections that layers share are this step's."""
    NAN_SCORES = "nan_scores"
    """Rows whose scores hold NaN."""


_NAMES = "|".join(Detector)
DETECTORS_PATTERN = rf"^({ALL}|{NONE}|({_NAMES})(,({_NAMES}))*)$"
"""What the setting may be."""

Detectors = frozenset[Detector]


def detectors(setting: str) -> Detectors:
    """Those that a setting of `DETECTORS_PATTERN` names."""
    if setting == ALL:
        return frozenset(Detector)
    return frozenset() if setting == NONE else frozenset(map(Detector, setting.split(",")))


@dataclass(frozen=True)
class Detection:
    """What a side's detectors are made with.

    Attributes:
        listener: who is told.
        enabled: the detectors that are on.
    """

    listener: FindingListener
    enabled: Detectors

    def has(self, detector: Detector) -> bool:
        return detector in self.enabled


NO_DETECTION = Detection(Findings(), detectors(NONE))
