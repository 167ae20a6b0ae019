"""How the detectors of one side of a session tell what they find; each side has its own besides."""

from collections.abc import Callable, Sequence

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.detectors import Detection, Detector
from ipc_handoff.fault_findings import fault_findings
from ipc_handoff.findings import Finding, FindingKind


class SideFindings:
    """Args:
    detection: which detectors are on, and whom they tell.
    layers: the session's layer ids by ordinal.

    Attributes:
        layers: those.
        checks_generations: slots are asked whose they are.
    """

    def __init__(self, detection: Detection, layers: Sequence[int]) -> None:
        self._detection = detection
        self.layers = layers
        self.checks_generations = detection.has(Detector.GENERATIONS)

    def has(self, detector: Detector) -> bool:
        """Whether it is on."""
        return self._detection.has(detector)

    def _faults(self, report: pb.StepReport, name: Callable[[int], str]) -> None:
        """Requests that the guard of inputs did not trust. name: as for `fault_findings`."""
        if report.faults and self.has(Detector.INPUTS):
            for finding in fault_findings(report, name):
                self._detection.listener.found(finding)

    def tell(
        self, kind: FindingKind, step: int, epoch: int, layer: int | None, stage: str,
        expected: str, seen: str, row: int | None = None, request: str | None = None,
    ) -> None:  # fmt: skip
        """Arguments: as for `Finding`."""
        self._detection.listener.found(
            Finding(kind, step, epoch, layer, stage, row, request, expected, seen)
        )
