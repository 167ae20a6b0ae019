"""checked_copy: which requests are distrusted for which torn offset."""

import pytest
import torch

from indexer_service.kernels.checked_inputs import CheckedInputs, checked_copy
from indexer_service.kernels.step import RowFault

OFFSETS = [0, 1, 2, 7, 20]


def checked(staged: list[int], exact: list[int] | None) -> CheckedInputs:
    return checked_copy(
        torch.tensor(staged, dtype=torch.int32),
        torch.tensor([9, 9, 9, 18], dtype=torch.int32),
        torch.zeros((4, 2), dtype=torch.int32),
        rows=20, decode_requests=2, rows_per_decode=1, pages=2, page_size=16, max_length=20,
        exact_query_start=exact,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value", "faults"),
    [
        (0, 1, [RowFault(0, "query_offsets", 0, 1)]),
        (2, 1, [RowFault(1, "query_offsets", 2, 1), RowFault(2, "query_offsets", 2, 1)]),
        (3, 2**31 - 1, [RowFault(r, "query_offsets", 7, 2**31 - 1) for r in (2, 3)]),
        (4, 19, [RowFault(3, "query_offsets", 20, 19)]),
    ],
)
def test_only_requests_beside_a_torn_offset_are_distrusted(
    place: int, value: int, faults: list[RowFault]
) -> None:
    staged = list(OFFSETS)
    staged[place] = value
    found = checked(staged, OFFSETS)
    assert found.faults == faults
    assert found.query_start.tolist() == OFFSETS


def test_without_exact_offsets_one_torn_offset_spoils_the_step() -> None:
    staged = [0, 1, 2, 30, 20]
    found = checked(staged, None)
    assert found.skip_requests == (0, 1, 2, 3)
    assert {(fault.expected, fault.seen) for fault in found.faults} == {(31, 20)}


def test_a_torn_offset_comes_before_other_faults_and_spares_none_of_them() -> None:
    found = checked_copy(
        torch.tensor([0, 5, 2], dtype=torch.int32),
        torch.tensor([-1, 33], dtype=torch.int32),
        torch.zeros((2, 2), dtype=torch.int32),
        rows=2, decode_requests=1, rows_per_decode=1, pages=2, page_size=16, max_length=32,
        exact_query_start=[0, 1, 2],
    )  # fmt: skip
    assert found.faults == [RowFault(0, "query_offsets", 1, 5), RowFault(1, "query_offsets", 1, 5)]
