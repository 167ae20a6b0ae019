"""Positions and slots against lengths and table: every wrong row, and no right one."""

from dataclasses import replace

import pytest
import torch

from dsa_indexer_cli.racelab.batches import Sort, geometry, make
from indexer_client import StepInputs
from indexer_client.positions import WrongRow, wrong_rows

PAGE = 32
GEOMETRY = geometry(heads=16, page_size=PAGE, top_k=16, max_context=128)


def inputs_of(sort: Sort, seed: int = 1) -> StepInputs:
    return make(GEOMETRY, sort, torch.Generator().manual_seed(seed))


@pytest.fixture
def inputs() -> StepInputs:
    """Two decode requests of three rows, two prefill requests."""
    return inputs_of(Sort(2, 2, next_n=3))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "sort",
    [Sort(), Sort(2, padded=2, next_n=2), Sort(3, next_n=4, exact=False), Sort(0, 3), Sort(2, 2)],
)
def test_right_rows_are_not_told(sort: Sort, seed: int) -> None:
    assert wrong_rows(inputs_of(sort, seed), PAGE) == ([], [])


def test_a_wrong_position_is_told_once_a_request(inputs: StepInputs) -> None:
    assert inputs.positions is not None
    right = inputs.positions.tolist()
    inputs.positions[4:] += 1
    found = wrong_rows(inputs, PAGE)
    starts = inputs.query_start.tolist()
    assert found.positions == [
        WrongRow(row, request, right[row], right[row] + 1)
        for request, row in ((1, 4), (2, starts[2]), (3, starts[3]))
    ]
    assert found.slots == []  # what a slot should be is not known of such a row


@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_wrong_slot_is_told(row: int, inputs: StepInputs) -> None:
    assert inputs.slots is not None
    right = int(inputs.slots[row])
    inputs.slots[row] = right + PAGE
    assert wrong_rows(inputs, PAGE) == ([], [WrongRow(row, row // 3, right, right + PAGE)])


def test_the_first_row_of_a_page_belongs_to_the_next_column() -> None:
    inputs = inputs_of(Sort(1))
    inputs.seq_lens[0] = PAGE + 1
    inputs = replace(inputs, positions=torch.tensor([PAGE]))
    table = inputs.block_table[0].tolist()
    right = replace(inputs, slots=torch.tensor([table[1] * PAGE]))
    assert wrong_rows(right, PAGE) == ([], [])
    wrong = replace(inputs, slots=torch.tensor([table[0] * PAGE]))
    assert [row.expected for row in wrong_rows(wrong, PAGE).slots] == [table[1] * PAGE]


def test_rows_that_write_nothing_or_hold_no_token_are_not_told(inputs: StepInputs) -> None:
    assert inputs.slots is not None and inputs.positions is not None
    inputs.slots[1] = -1
    inputs.seq_lens[0] = 0
    inputs.positions[:3] = 77
    assert wrong_rows(inputs, PAGE) == ([], [])


@pytest.mark.parametrize("place", [0, 1, -1])
def test_offsets_that_are_wrong_themselves_say_nothing(place: int, inputs: StepInputs) -> None:
    inputs.query_start[place] += 100
    assert wrong_rows(inputs, PAGE) == ([], [])


def test_a_table_that_ends_before_a_length_says_nothing_of_slots(inputs: StepInputs) -> None:
    """Of rows beyond it; the guard of inputs tells of the length."""
    assert inputs.slots is not None
    inputs.slots.fill_(12345)
    narrow = replace(inputs, block_table=inputs.block_table[:, :1])
    told = wrong_rows(narrow, PAGE)
    reach = [length <= PAGE for length in inputs.seq_lens.tolist()]
    assert [row.request for row in told.slots] == [at for at, inside in enumerate(reach) if inside]
    assert told.positions == []


def test_without_positions_nothing_is_looked_at(inputs: StepInputs) -> None:
    assert wrong_rows(replace(inputs, positions=None), PAGE) == ([], [])
    assert inputs.positions is not None
    inputs.positions[0] += 1
    assert len(wrong_rows(replace(inputs, slots=None), PAGE).positions) == 1
