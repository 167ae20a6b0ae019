"""From vLLM's batch to a step's inputs."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from indexer_client.inputs import MAX_ROWS_PER_DECODE, StepInputs
from ipc_handoff.layout import HandoffGeometry


class Batch(Protocol):
    """The part of vLLM's `CommonAttentionMetadata` that a step is made from.

    query_start_loc and its CPU copy int32 [R + 1], seq_lens int32 [R], block_table_tensor int32
    [R, n]; the last requests may be padding, without rows.
    """

    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def query_start_loc_cpu(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def block_table_tensor(self) -> Tensor: ...
    @property
    def num_reqs(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


def step_inputs(
    batch: Batch, geometry: HandoffGeometry, lengths: Sequence[int] | None
) -> StepInputs | None:
    """The step of a batch; None if nobody asks anything.

    Args:
        geometry: of the session: the block table is cut to what fits.
        lengths: [R] or more, of each request as the CPU knows it, where that is exact.
    """
    starts = row_starts(batch)
    requests = len(starts) - 1
    if not requests:
        return None
    exact = None if lengths is None else lengths[:requests]
    decodes, rows_per_decode = leading_decodes(starts)
    longest = batch.max_seq_len if exact is None else max(exact)
    return StepInputs(
        query_start=batch.query_start_loc[: requests + 1],
        seq_lens=batch.seq_lens[:requests],
        block_table=batch.block_table_tensor[:requests, : geometry.table_width],
        rows=starts[-1],
        decode_requests=decodes,
        rows_per_decode=rows_per_decode,
        max_length=min(max(longest, 1), geometry.max_context),
        exact_seq_lens=exact,
        exact_query_start=starts,
    )


def row_starts(batch: Batch) -> list[int]:
    """First row of each request that has rows, then the number of rows."""
    starts: list[int] = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
    while len(starts) > 1 and starts[-1] == starts[-2]:
        starts.pop()
    return starts


def leading_decodes(starts: Sequence[int]) -> tuple[int, int]:
    """How many requests at the front have as many rows as the first, and how many those are.

    They are scored together; every other request alone. More rows than a decode can have are a
    prefill: then (0, 0).
    """
    rows = starts[1] - starts[0]
    if rows > MAX_ROWS_PER_DECODE:
        return 0, 0
    count = 0
    while count + 1 < len(starts) and starts[count + 1] - starts[count] == rows:
        count += 1
    return count, rows
