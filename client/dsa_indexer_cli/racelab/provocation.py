"""One race that the lab provokes, and how often it is caught."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from dsa_indexer_cli.racelab.result import Provoked
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import Finding, FindingKind

Progress = Callable[[str], None]


class Seen(NamedTuple):
    """side: worker or service."""

    side: str
    finding: Finding


class AnyBench(Protocol):
    """What findings are taken from."""

    def forget(self) -> None:
        """What was found so far does not count."""

    def findings(self) -> list[Seen]:
        """What was found since then."""

    def of(self, step: int, kind: FindingKind) -> Sequence[Seen]:
        """The same, of a step."""


B = TypeVar("B", bound=AnyBench)
T = TypeVar("T")


@dataclass(frozen=True)
class Provocation(Generic[B, T]):
    """Attributes:
    name: for people and reports.
    kind: of the finding that must be told of the step.
    detector: the one that tells.
    provoke: races once; the number of the step that raced.
    terms: of the bench that it needs.
    """

    name: str
    kind: FindingKind
    detector: Detector
    provoke: Callable[[B], int]
    terms: T


def provoke(
    made: B,
    races: Sequence[Provocation[B, T]],
    times: int,
    progress: Progress,
    seconds: float = math.inf,
) -> list[Provoked]:
    """Each of them so many times, on a bench of their terms.

    Args:
        seconds: for all of them; each race begins with an equal part of what is left, and is
            provoked less often if that ends before.
    """
    found = []
    ends = time.monotonic() + seconds
    for place, race in enumerate(races):
        progress(race.name)
        one = Provoked(race.name, race.kind, race.detector)
        began = time.monotonic()
        enough = began + (ends - began) / (len(races) - place)
        while one.provoked < times and (not one.provoked or time.monotonic() < enough):
            made.forget()
            one.provoked += 1
            seen = made.of(race.provoke(made), race.kind)
            one.caught += bool(seen)
            for side, finding in seen:
                stage = f"{side}: {finding.stage}"
                if stage not in one.stages:
                    one.stages.append(stage)
                one.example = one.example or str(finding)
        one.milliseconds = (time.monotonic() - began) / one.provoked * 1000
        found.append(one)
    return found
