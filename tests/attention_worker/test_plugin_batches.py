"""Steps made from vLLM's batches, which tests make up: no vLLM is needed."""

from types import SimpleNamespace

import pytest
import torch

from attention_worker.plugin.batches import leading_decodes, step_inputs
from ipc_handoff.layout import HandoffGeometry

GEOMETRY = HandoffGeometry(
    layers=(0,),
    heads=16,
    head_dim=128,
    top_k=64,
    page_size=64,
    max_rows=128,
    max_requests=8,
    max_context=512,
    slots=2,
)


def batch(rows: list[int], lengths: list[int], *, longest: int = 500) -> SimpleNamespace:
    """Rows of each request (0: padding) and their lengths; a table wider than the geometry's."""
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return SimpleNamespace(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=torch.arange(len(rows) * 10, dtype=torch.int32).view(-1, 10),
        num_reqs=len(rows),
        max_seq_len=longest,
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1, 1, 1], (3, 1)),
        ([4, 4, 1, 4], (2, 4)),
        ([1, 1, 70], (2, 1)),
        ([70, 1], (0, 0)),
        ([8], (1, 8)),
        ([9], (0, 0)),
    ],
)
def test_decodes_are_the_equal_requests_at_the_front(
    rows: list[int], expected: tuple[int, int]
) -> None:
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    assert leading_decodes(starts) == expected


@pytest.mark.parametrize(
    "rows", [[1], [1, 1, 1], [3, 3, 70], [70, 2], [2, 2, 1, 3], [1, 1, 0, 0], [128]]
)
def test_a_step_fits_the_agreement(rows: list[int]) -> None:
    lengths = [100 + count if count else 0 for count in rows]
    inputs = step_inputs(batch(rows, lengths), GEOMETRY, lengths)
    assert inputs is not None
    inputs.check(GEOMETRY)
    real = [count for count in rows if count]
    assert inputs.requests == len(real)
    assert inputs.rows == sum(real)
    assert inputs.block_table.shape == (len(real), GEOMETRY.table_width)
    assert inputs.exact_seq_lens == lengths[: len(real)]
    assert inputs.max_length == max(lengths)


def test_unknown_lengths_are_bounded() -> None:
    inputs = step_inputs(batch([1], [9], longest=10_000), GEOMETRY, None)
    assert inputs is not None
    inputs.check(GEOMETRY)
    assert inputs.exact_seq_lens is None
    assert inputs.max_length == GEOMETRY.max_context


def test_a_batch_without_rows_is_no_step() -> None:
    assert step_inputs(batch([0, 0], [0, 0]), GEOMETRY, [0, 0]) is None
