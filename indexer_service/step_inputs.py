"""A step's lengths, offsets and tables: a private copy, checked before anything uses it.

The worker's memory may change at any time (a fault there is what this product looks for), so
what was checked must be what is used: the small tensors are copied once a step, after the
worker published it. q, weights and K values are read in place: they cannot lead outside.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.kernels import step as step_kernels
from indexer_service.kernels.step import RowFault, find_faults
from ipc_handoff.banks import StagingSlot
from ipc_handoff.layout import REPORTED_FAULTS, HandoffGeometry

_REASONS = {
    step_kernels.NEGATIVE_LENGTH: pb.ROW_FAULT_REASON_NEGATIVE_LENGTH,
    step_kernels.LENGTH_OUT_OF_BOUNDS: pb.ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS,
    step_kernels.PAGE_OUT_OF_BOUNDS: pb.ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS,
    step_kernels.TORN_INPUT: pb.ROW_FAULT_REASON_TORN_INPUT,
}


@dataclass(frozen=True)
class StepInputs:
    """Attributes:
    query_start: int32 [R+1]; seq_lens: int32 [R]; block_table: int32 [R, n], all private.
    faults: requests that must not be computed.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    faults: list[RowFault]

    @property
    def skip_requests(self) -> tuple[int, ...]:
        return tuple(fault.request for fault in self.faults)


def copy_inputs(
    plan: pb.StepPlan, slot: StagingSlot, geometry: HandoffGeometry, pages: int
) -> StepInputs:
    """Copy and check what the worker staged for `plan`.

    Args:
        pages: of the smallest K cache among the plan's layers.
    """
    requests = plan.requests
    width = -(-plan.max_length // geometry.page_size)
    query_start = slot.query_start[: requests + 1].clone()
    seq_lens = slot.seq_lens[:requests].clone()
    block_table = slot.block_table[:requests, :width].clone()
    wrong_offset = _wrong_offset(plan, query_start.tolist())
    if wrong_offset is not None:
        # Without offsets no row's request is known: nothing of this step can be trusted.
        faults = [
            RowFault(request, step_kernels.TORN_INPUT, *wrong_offset) for request in range(requests)
        ]
        query_start = _planned_offsets(plan)
    else:
        exact = None
        if plan.HasField("exact"):
            exact = torch.tensor(plan.exact.seq_lens, dtype=torch.int32)
        faults = find_faults(
            query_start,
            seq_lens,
            block_table,
            pages=pages,
            page_size=geometry.page_size,
            max_length=plan.max_length,
            exact_seq_lens=exact,
        )
    return StepInputs(query_start, seq_lens, block_table, faults)


def _wrong_offset(plan: pb.StepPlan, offsets: list[int]) -> tuple[int, int] | None:
    """The first query offset that contradicts the plan, as (expected, seen)."""
    for request in range(plan.decode_requests + 1):
        if offsets[request] != request * plan.rows_per_decode:
            return request * plan.rows_per_decode, offsets[request]
    for before, after in pairwise(offsets):
        if after <= before:
            return before + 1, after
    return None if offsets[-1] == plan.rows else (plan.rows, offsets[-1])


def _planned_offsets(plan: pb.StepPlan) -> torch.Tensor:
    """Offsets in range that stand in for torn ones; no row of them is computed.

    Where the rows of prefill requests end is not known: all but the first get one.
    """
    requests = torch.arange(plan.requests + 1, dtype=torch.int32)
    offsets = requests + (plan.rows - plan.requests)
    decodes = requests[: plan.decode_requests + 1]
    offsets[: plan.decode_requests + 1] = decodes * plan.rows_per_decode
    return offsets


def report_faults(report: pb.StepReport, inputs: StepInputs) -> None:
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
