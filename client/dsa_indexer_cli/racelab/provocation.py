"""One race that the lab provokes, and how often it is caught."""

import time
from collections.abc import Callable, Iterable, Sequence
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
    made: B, races: Iterable[Provocation[B, T]], times: int, progress: Progress
) -> list[Provoked]:
    """Each of them so many times, on a bench of their terms."""
    found = []
    for race in races:
        progress(race.name)
        one = Provoked(race.name, race.kind, race.detector, times)
        began = time.monotonic()
        for _ in range(times):
            made.forget()
            seen = made.of(race.provoke(made), race.kind)
            one.caught += bool(seen)
            for side, finding in seen:
                stage = f"{side}: {finding.stage}"
                if stage not in one.stages:
                    one.stages.append(stage)
                one.example = one.example or str(finding)
        one.milliseconds = (time.monotonic() - began) / max(times, 1) * 1000
        found.append(one)
    return found
