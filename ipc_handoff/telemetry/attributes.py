"""What spans carry."""

from collections.abc import Mapping, Sequence

from ipc_handoff.findings import Finding
from ipc_handoff.stages import FINDING_EVENT

Value = str | int | bool | float | Sequence[str]
Attributes = Mapping[str, Value]
Times = Sequence[Sequence[int]]
"""[layer ordinal][stage], monotonic ns; 0: not reached."""


def finding_attributes(finding: Finding) -> Attributes:
    """A finding as an event carries it."""
    told: dict[str, str | int | None] = {
        FINDING_EVENT: finding.kind.value,
        "dsa.stage": finding.stage,
        "dsa.layer": finding.layer,
        "dsa.row": finding.row,
        "dsa.request": finding.request,
        "dsa.expected": finding.expected,
        "dsa.seen": finding.seen,
        "dsa.likely_cause": finding.kind.cause,
        "dsa.workaround": finding.kind.workaround,
    }
    return {name: value for name, value in told.items() if value is not None}
