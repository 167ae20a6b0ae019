"""What a step plan must satisfy before anything of it is read or run."""

from itertools import pairwise

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import exhausted, invalid, precondition
from ipc_handoff.layout import HandoffGeometry

MAX_ROWS_PER_DECODE = 8


def check_plan(plan: pb.StepPlan, geometry: HandoffGeometry, epoch: int, last_step: int) -> None:
    """Check a plan against what its session agreed on.

    Args:
        last_step: the newest step the session has seen.

    Raises:
        ServiceError: FAILED_PRECONDITION for a stale epoch or step, RESOURCE_EXHAUSTED over an
            agreed limit, INVALID_ARGUMENT for everything else.
    """
    if plan.epoch != epoch:
        raise precondition(
            "plan.epoch", f"{plan.epoch}, the session's is {epoch}", "open a new session"
        )
    if plan.step <= last_step:
        raise precondition(
            "plan.step",
            f"{plan.step} after {last_step}",
            "steps ascend from 1 and never restart in a worker's life",
        )
    _check_shape(plan, geometry)
    _check_layers(plan, geometry)
    _check_lengths(plan, geometry)
    _check_trace(plan)


def _check_shape(plan: pb.StepPlan, geometry: HandoffGeometry) -> None:
    if plan.rows > geometry.max_rows:
        raise exhausted("plan.rows", f"{plan.rows}, agreed {geometry.max_rows}", "smaller steps")
    if plan.requests > geometry.max_requests:
        raise exhausted(
            "plan.requests", f"{plan.requests}, agreed {geometry.max_requests}", "fewer requests"
        )
    if plan.rows < 1 or plan.requests < 1:
        raise invalid(
            "plan.rows", f"{plan.rows} rows, {plan.requests} requests", "at least one of each"
        )
    if plan.decode_requests > plan.requests:
        raise invalid(
            "plan.decode_requests",
            f"{plan.decode_requests} of {plan.requests} requests",
            "at most plan.requests",
        )
    if plan.decode_requests and not 1 <= plan.rows_per_decode <= MAX_ROWS_PER_DECODE:
        raise invalid(
            "plan.rows_per_decode", f"{plan.rows_per_decode}", f"1 to {MAX_ROWS_PER_DECODE}"
        )
    decode_rows = plan.decode_requests * plan.rows_per_decode
    prefill_requests = plan.requests - plan.decode_requests
    prefill_rows = plan.rows - decode_rows
    if prefill_rows < prefill_requests or (prefill_rows and not prefill_requests):
        raise invalid(
            "plan.rows",
            f"{plan.rows} rows for {decode_rows} decode rows and {prefill_requests} prefill "
            "requests",
            "decode_requests * rows_per_decode rows, and one or more a prefill request",
        )
    if plan.HasField("row_range") and (plan.row_range.begin, plan.row_range.end) != (0, plan.rows):
        raise invalid(
            "plan.row_range",
            f"{plan.row_range.begin} to {plan.row_range.end}",
            "leave it out: this service scores every row of a step",
        )


def _check_layers(plan: pb.StepPlan, geometry: HandoffGeometry) -> None:
    if len(plan.layers) > len(geometry.layers):
        raise invalid(
            "plan.layers",
            f"{len(plan.layers)} layers, the session has {len(geometry.layers)}",
            "one or more, each once",
        )
    unknown = sorted(set(plan.layers) - set(geometry.layers))
    if unknown:
        raise invalid("plan.layers", f"layer {unknown[0]} has no indexer", "the session's layers")
    if not plan.layers or len(set(plan.layers)) != len(plan.layers):
        raise invalid("plan.layers", f"{list(plan.layers)[:8]}", "one or more, each once")


def _check_lengths(plan: pb.StepPlan, geometry: HandoffGeometry) -> None:
    if not 1 <= plan.max_length <= geometry.max_context:
        raise invalid(
            "plan.max_length",
            f"{plan.max_length} tokens, the block table reaches {geometry.max_context}",
            "a bound of 1 to the session's max_context",
        )
    if not plan.HasField("exact"):
        return
    if plan.exact.query_start:
        _check_exact_rows(plan)
    lengths = plan.exact.seq_lens
    if not lengths and plan.exact.query_start:
        return
    if len(lengths) != plan.requests:
        raise invalid(
            "plan.exact.seq_lens",
            f"{len(lengths)} values for {plan.requests} requests",
            "one a request, or leave them out",
        )
    if min(lengths) < 0:
        raise invalid("plan.exact.seq_lens", f"{min(lengths)}", "lengths of 0 or more tokens")
    if max(lengths) > plan.max_length:
        raise invalid(
            "plan.exact.seq_lens",
            f"{max(lengths)} is over plan.max_length {plan.max_length}",
            "max_length bounds every length",
        )


def _check_exact_rows(plan: pb.StepPlan) -> None:
    field, offsets = "plan.exact.query_start", plan.exact.query_start
    if len(offsets) != plan.requests + 1:
        raise invalid(
            field,
            f"{len(offsets)} values for {plan.requests} requests",
            "one a request and the number of rows, or leave them out",
        )
    if offsets[0] != 0 or offsets[-1] != plan.rows:
        raise invalid(field, f"{offsets[0]} to {offsets[-1]}", f"0 to plan.rows {plan.rows}")
    for request, (begin, end) in enumerate(pairwise(offsets)):
        decodes = request < plan.decode_requests
        if end <= begin or (decodes and end - begin != plan.rows_per_decode):
            raise invalid(
                field,
                f"request {request} has rows {begin} to {end}",
                "plan.rows_per_decode rows a decode request, one or more a prefill request",
            )


def _check_trace(plan: pb.StepPlan) -> None:
    if plan.HasField("trace") and (
        len(plan.trace.trace_id) != 16 or len(plan.trace.span_id) != 8 or plan.trace.flags > 0xFF
    ):
        raise invalid(
            "plan.trace", "not a W3C context", "16 bytes of trace_id, 8 of span_id, one of flags"
        )
