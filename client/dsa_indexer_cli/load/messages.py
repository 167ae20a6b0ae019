"""What a session's process tells the one that started it."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dsa_indexer_cli.load.workload import Workload


class Column(IntEnum):
    """Of a step's record; behind these come the nanoseconds of its layers.

    Times are nanoseconds of the monotonic clock, which all processes of a machine share. A step
    that was never begun has BEGAN -1, and in ENDED the time at which it was given up.
    """

    INTENDED = 0
    BEGAN = 1
    ENDED = 2
    KIND = 3
    REQUESTS = 4
    ROWS = 5
    LONGEST = 6
    INLINE = 7


NOT_BEGUN = -1
NO_LAYER = -1


def width(workload_layers: int) -> int:
    """Columns of a record."""
    return len(Column) + workload_layers


@dataclass(frozen=True)
class Order:
    """What a session shall do."""

    number: int
    address: str
    workload: Workload


@dataclass(frozen=True)
class Ready:
    """Attached, and waiting for the time to start."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Records:
    """Steps that have ended: int64 [n, width], as bytes."""

    data: bytes

    def rows(self, layers: int) -> np.ndarray:
        return np.frombuffer(self.data, np.int64).reshape(-1, width(layers))


@dataclass
class Done:
    """How it ended.

    Attributes:
        checked: answers that were compared with the reference.
        wrong: one line a wrong answer, the first ones.
        wrong_answers: all of them.
        paused_seconds: in which a closed loop compared answers or attached anew.
    """

    number: int
    checked: int = 0
    wrong_answers: int = 0
    wrong: list[str] = field(default_factory=list)
    reopened: int = 0
    cancelled_steps: int = 0
    rejected_steps: int = 0
    detachments: int = 0
    faulted_rows: int = 0
    paused_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """It could not go on."""

    number: int
    reason: str
