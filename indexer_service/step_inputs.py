"""What the worker staged for a step, and how its faults are reported."""

from collections.abc import Callable, Sequence

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import invalid, precondition
from indexer_service.kernels import step as step_kernels
from indexer_service.kernels.checked_inputs import CheckedInputs, checked_copy
from ipc_handoff.banks import StagingSlot, k_cache_region
from ipc_handoff.layout import REPORTED_FAULTS, HandoffGeometry

_REASONS = {
    step_kernels.NEGATIVE_LENGTH: pb.ROW_FAULT_REASON_NEGATIVE_LENGTH,
    step_kernels.LENGTH_OUT_OF_BOUNDS: pb.ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS,
    step_kernels.PAGE_OUT_OF_BOUNDS: pb.ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS,
    step_kernels.TORN_INPUT: pb.ROW_FAULT_REASON_TORN_INPUT,
    step_kernels.QUERY_OFFSETS: pb.ROW_FAULT_REASON_QUERY_OFFSETS,
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
        exact_query_start=plan.exact.query_start or None,
    )


def offsets_of(plan: pb.StepPlan) -> Sequence[int]:
    """First row of each request, and the number of rows, as the plan says.

    Raises:
        ServiceError: INVALID_ARGUMENT where the plan does not.
    """
    if plan.exact.query_start:
        return list(plan.exact.query_start)
    if plan.decode_requests < plan.requests:
        raise invalid(
            "plan.exact.query_start",
            f"left out, with {plan.requests - plan.decode_requests} prefill requests",
            "the first row of each request: a service on a GPU does not read it from there",
        )
    return range(0, plan.rows + 1, plan.rows_per_decode)


def k_caches_of(
    plan: pb.StepPlan, k_cache: Callable[[int], torch.Tensor | None]
) -> dict[int, torch.Tensor]:
    """The K cache of each of a plan's layers.

    Raises:
        ServiceError: FAILED_PRECONDITION: one is not registered, or holds less than the plan says.
    """
    caches = {}
    longest = max(plan.exact.seq_lens, default=0)
    for layer in plan.layers:
        cache = k_cache(layer)
        name = k_cache_region(layer)
        if cache is None:
            raise precondition("plan.layers", f"{name} is not registered", "register it first")
        tokens = cache.shape[0] * cache.shape[1]
        if longest > tokens:
            raise precondition(
                "plan.exact.seq_lens",
                f"{longest} tokens, {name} holds {tokens}",
                "register the whole K cache",
            )
        caches[layer] = cache
    return caches


def report_faults(
    report: pb.StepReport, faults: Sequence[step_kernels.RowFault], offsets: Sequence[int]
) -> None:
    """Name every row that got -1 because of its request's fault.

    Args:
        offsets: first row of each request, and the number of rows.
    """
    for fault in faults:
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
