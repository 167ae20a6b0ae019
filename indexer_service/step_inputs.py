"""What the worker staged for a step, and how its faults are reported."""

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.kernels import step as step_kernels
from indexer_service.kernels.checked_inputs import CheckedInputs, checked_copy
from ipc_handoff.banks import StagingSlot
from ipc_handoff.layout import REPORTED_FAULTS, HandoffGeometry

_REASONS = {
    step_kernels.NEGATIVE_LENGTH: pb.ROW_FAULT_REASON_NEGATIVE_LENGTH,
    step_kernels.LENGTH_OUT_OF_BOUNDS: pb.ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS,
    step_kernels.PAGE_OUT_OF_BOUNDS: pb.ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS,
    step_kernels.TORN_INPUT: pb.ROW_FAULT_REASON_TORN_INPUT,
}


def copy_inputs(
    plan: pb.StepPlan, slot: StagingSlot, geometry: HandoffGeometry, pages: int
) -> CheckedInputs:
    """Copy and check what the worker staged for `plan`.

    q, weights and K values are read in place: they cannot lead outside.

    Args:
        pages: of the smallest K cache among the plan's layers.
    """
    return checked_copy(
        slot.query_start[: plan.requests + 1],
        slot.seq_lens[: plan.requests],
        slot.block_table[: plan.requests],
        rows=plan.rows,
        decode_requests=plan.decode_requests,
        rows_per_decode=plan.rows_per_decode,
        pages=pages,
        page_size=geometry.page_size,
        max_length=plan.max_length,
        exact_seq_lens=plan.exact.seq_lens or None,
    )


def report_faults(report: pb.StepReport, inputs: CheckedInputs) -> None:
    """Name every row that got -1 because of its request's fault."""
    offsets = inputs.query_start.tolist()
    for fault in inputs.faults:
        begin, end = offsets[fault.request], offsets[fault.request + 1]
        report.fault_count += end - begin
        for row in range(begin, end):
            if len(report.faults) == REPORTED_FAULTS:
                break
            report.faults.add(
                row=row,
                request=fault.request,
                reason=_REASONS[fault.reason],
                expected=fault.expected,
                seen=fault.seen,
            )
