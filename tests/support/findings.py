"""A listener that keeps what it is told."""

from ipc_handoff.detectors import ALL, Detection, detectors
from ipc_handoff.findings import Finding, FindingKind


class Kept:
    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)

    @property
    def kinds(self) -> list[FindingKind]:
        return [finding.kind for finding in self.findings]

    @property
    def only(self) -> Finding:
        """The one that there must be."""
        assert len(self.findings) == 1, self.findings
        return self.findings[0]

    @property
    def detection(self) -> Detection:
        """All detectors, and they tell this one."""
        return Detection(self, detectors(ALL))
