"""A step's offsets, lengths and tables: a private copy, checked before anything uses it.

Service and fallback both go through `checked_copy`, so that they distrust the same requests. The
originals may change at any time (they may lie in another process's memory, and a fault there is
what this product looks for): what was checked must be what is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from indexer_service.kernels.step import QUERY_OFFSETS, RowFault, find_faults


@dataclass(frozen=True)
class CheckedInputs:
    """Attributes:
    query_start: int32 [R+1]; seq_lens: int32 [R]; block_table: int32 [R, n].
    faults: requests that must not be computed, in order.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    faults: list[RowFault]

    @property
    def skip_requests(self) -> tuple[int, ...]:
        """For `select_step`."""
        return tuple(fault.request for fault in self.faults)


def checked_copy(
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    rows: int,
    decode_requests: int,
    rows_per_decode: int,
    pages: int,
    page_size: int,
    max_length: int,
    exact_seq_lens: Sequence[int] | None = None,
    exact_query_start: Sequence[int] | None = None,
) -> CheckedInputs:
    """Copy a step's inputs and find the requests that cannot be trusted.

    Args:
        query_start: int32 [R+1]; seq_lens: int32 [R]; block_table: int32 [R, n].
        rows, decode_requests, rows_per_decode: what the offsets must agree with; they come from
            the CPU.
        pages, page_size: of the smallest K cache that the step reads.
        max_length: bound of every length.
        exact_seq_lens: the lengths as the CPU knows them, where it does.
        exact_query_start: the same for the offsets. They are then used, and only requests whose
            offsets differ are distrusted.
    """
    requests = len(seq_lens)
    query_start, seq_lens = query_start.clone(), seq_lens.clone()
    block_table = block_table[:, : -(-max_length // page_size)].clone()
    offsets = query_start.tolist()
    torn: dict[int, RowFault] = {}
    if exact_query_start is not None:
        torn = _torn_offsets(offsets, exact_query_start)
        query_start = torch.tensor(exact_query_start, dtype=torch.int32, device=seq_lens.device)
    elif (wrong := _wrong_offset(offsets, rows, decode_requests, rows_per_decode)) is not None:
        # Without offsets no row's request is known: nothing of this step can be trusted.
        torn = {request: RowFault(request, QUERY_OFFSETS, *wrong) for request in range(requests)}
        query_start = _planned_offsets(requests, rows, decode_requests, rows_per_decode)
    exact = None
    if exact_seq_lens is not None:
        exact = torch.tensor(exact_seq_lens, dtype=torch.int32, device=seq_lens.device)
    found = find_faults(
        query_start,
        seq_lens,
        block_table,
        pages=pages,
        page_size=page_size,
        max_length=max_length,
        exact_seq_lens=exact,
    )
    faults = {fault.request: fault for fault in found} | torn
    in_order = [faults[request] for request in sorted(faults)]
    return CheckedInputs(query_start, seq_lens, block_table, in_order)


def _torn_offsets(offsets: Sequence[int], exact: Sequence[int]) -> dict[int, RowFault]:
    """Requests of which one offset, the first or else the last, is not what the CPU knows."""
    torn = {}
    for request in range(len(exact) - 1):
        for at in (request + 1, request):
            if offsets[at] != exact[at]:
                torn[request] = RowFault(request, QUERY_OFFSETS, exact[at], offsets[at])
    return torn


def _wrong_offset(
    offsets: list[int], rows: int, decode_requests: int, rows_per_decode: int
) -> tuple[int, int] | None:
    """The first query offset that contradicts the plan, as (expected, seen)."""
    for request in range(decode_requests + 1):
        if offsets[request] != request * rows_per_decode:
            return request * rows_per_decode, offsets[request]
    for before, after in pairwise(offsets):
        if after <= before:
            return before + 1, after
    return None if offsets[-1] == rows else (rows, offsets[-1])


def _planned_offsets(
    requests: int, rows: int, decode_requests: int, rows_per_decode: int
) -> Tensor:
    """Offsets in range that stand in for torn ones; no row of them is computed.

    Where the rows of prefill requests end is not known: all but the first get one.
    """
    numbers = torch.arange(requests + 1, dtype=torch.int32)
    offsets = numbers + (rows - requests)
    offsets[: decode_requests + 1] = numbers[: decode_requests + 1] * rows_per_decode
    return offsets
