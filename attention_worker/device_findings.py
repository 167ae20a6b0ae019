"""What the worker's kernels have found, told as findings of its session."""

import logging
from typing import NamedTuple

from attention_worker.inline_kernels import Looks
from indexer_client.step_findings import WorkerFindings
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import FindingKind
from ipc_handoff.generations import Generation, named
from ipc_handoff.kernels.found import Contradiction, Entry, Found

logger = logging.getLogger(__name__)

_STAGE, _WAIT, _HAND_BACK, _ATTEND = "dsa.stage", "dsa.wait", "dsa.handback", "dsa.attend"


class _Meaning(NamedTuple):
    kind: FindingKind
    stage: str
    expected: str = "{}"


_MEANINGS = {
    Contradiction.TORN_INPUT: _Meaning(FindingKind.TORN_INPUT, _STAGE),
    Contradiction.NEGATIVE_LENGTH: _Meaning(FindingKind.BAD_LENGTH, _STAGE, "at least {}"),
    Contradiction.LENGTH_OUT_OF_BOUNDS: _Meaning(FindingKind.BAD_LENGTH, _STAGE, "at most {}"),
    Contradiction.PAGE_OUT_OF_BOUNDS: _Meaning(FindingKind.BAD_PAGE, _STAGE, "a page of {}"),
    Contradiction.QUERY_OFFSETS: _Meaning(FindingKind.BAD_QUERY_OFFSETS, _STAGE),
    Contradiction.POSITION: _Meaning(FindingKind.BAD_POSITION, _STAGE),
    Contradiction.SLOT: _Meaning(FindingKind.BAD_SLOT, _STAGE),
    Contradiction.STALE_ANSWER: _Meaning(FindingKind.STALE_ANSWER, _WAIT),
    Contradiction.OVERWRITTEN_ANSWER: _Meaning(FindingKind.OVERWRITTEN_BEFORE_READ, _HAND_BACK),
    Contradiction.SHARED_INDEX_LEAK: _Meaning(FindingKind.SHARED_INDEX_LEAK, _ATTEND),
}
_OF_ANSWERS = (Contradiction.STALE_ANSWER, Contradiction.OVERWRITTEN_ANSWER)


class DeviceFindings:
    """Args:
    findings: of the session.
    found: where the kernels tell.
    """

    def __init__(self, findings: WorkerFindings, found: Found) -> None:
        self._findings = findings
        self._found = found
        self._last: tuple[int, int, int, int] | None = None
        self._lost = 0

    def looks(self, is_posted: bool) -> Looks | None:
        """What a step's inputs are looked at for; None: nothing.

        Args:
            is_posted: the service tells of requests that are not trusted.
        """
        faults = self._findings.has(Detector.INPUTS) and not is_posted
        rows = self._findings.has(Detector.POSITIONS)
        return Looks(self._found, faults, rows) if faults or rows else None

    def tell(self, epoch: int) -> None:
        """What was found since the last call; never waits.

        Args:
            epoch: of the attachment; 0: none.
        """
        for entry in self._found.new():
            # Each program that saw an answer overwritten has said so.
            what = (entry.kind, entry.step, entry.ordinal, entry.request)
            if what != self._last:
                self._tell(entry, epoch)
            self._last = what
        if self._found.lost > self._lost:
            lost, self._lost = self._found.lost - self._lost, self._found.lost
            logger.warning("%d more findings were overwritten before they were looked at", lost)

    def _tell(self, entry: Entry, epoch: int) -> None:
        what = Contradiction(entry.kind)
        meaning = _MEANINGS[what]
        expected, seen = str(entry.expected), str(entry.seen)
        if what in _OF_ANSWERS:
            expected, seen = (
                named(Generation.of(word), self._findings.layers)
                for word in (entry.expected, entry.seen)
            )
        elif what is Contradiction.SHARED_INDEX_LEAK:
            expected, seen = f"step {expected}", f"step {seen}"
        self._findings.tell(
            meaning.kind,
            entry.step,
            epoch,
            None if entry.ordinal < 0 else self._findings.layers[entry.ordinal],
            meaning.stage,
            meaning.expected.format(expected),
            seen,
            None if entry.row < 0 else entry.row,
            None if entry.request < 0 else self._findings.request(entry.step, entry.request),
        )
