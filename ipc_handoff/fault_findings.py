"""The findings in a step's report: both sides tell them, each under its own names of requests."""

from collections.abc import Callable

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.findings import Finding, FindingKind

_STAGE = "dsa.gate"

_KINDS = {
    pb.ROW_FAULT_REASON_TORN_INPUT: (FindingKind.TORN_INPUT, "{}"),
    pb.ROW_FAULT_REASON_QUERY_OFFSETS: (FindingKind.BAD_QUERY_OFFSETS, "{}"),
    pb.ROW_FAULT_REASON_NEGATIVE_LENGTH: (FindingKind.BAD_LENGTH, "at least {}"),
    pb.ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS: (FindingKind.BAD_LENGTH, "at most {}"),
    pb.ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS: (FindingKind.BAD_PAGE, "a page of {}"),
}


def fault_findings(report: pb.StepReport, name: Callable[[int], str]) -> list[Finding]:
    """One a request that was not trusted, of the first 64 rows; none for a reason of a version to
    come.

    Args:
        name: of a request, by its place in the batch.
    """
    found: dict[int, Finding] = {}
    for fault in report.faults:
        if fault.request in found or fault.reason not in _KINDS:
            continue
        kind, expected = _KINDS[fault.reason]
        found[fault.request] = Finding(
            kind=kind,
            step=report.step,
            epoch=report.epoch,
            layer=None,
            stage=_STAGE,
            row=fault.row,
            request=name(fault.request),
            expected=expected.format(fault.expected),
            seen=str(fault.seen),
        )
    return list(found.values())
