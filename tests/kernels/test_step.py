"""select_step: one layer of a mixed batch; find_faults: what must not be computed."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from indexer_service.kernels.step import RowFault, enqueue_step, find_faults, select_step
from tests.kernels import inputs, naive

K = 24
PAGE = 16
HEADS = 4
DIM = 32


def int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Requests of (rows, length), over one cache; the first ones are decode requests."""

    def __init__(self, requests: list[tuple[int, int]], decode: int, columns: int = 10) -> None:
        source = torch.Generator().manual_seed(len(requests) + decode)
        self.requests = requests
        rows = sum(n for n, _ in requests)
        self.q = inputs.codes(source, rows, HEADS, DIM)
        self.weights = torch.randn((rows, HEADS), generator=source)
        self.k_cache = inputs.k_cache(source, len(requests) * columns, PAGE, DIM)
        starts = [0]
        for n, _ in requests:
            starts.append(starts[-1] + n)
        self.query_start = int32(starts)
        self.seq_lens = int32([length for _, length in requests])
        pages = torch.randperm(len(requests) * columns, generator=source)
        self.block_table = pages.view(-1, columns).to(torch.int32)
        self.decode_requests = decode
        self.rows_per_decode = requests[0][0] if decode else 0

    def select(self, **changes: Any) -> Tensor:
        out = torch.full((len(self.q), K), 77, dtype=torch.int32)
        arguments: dict[str, Any] = {
            "decode_requests": self.decode_requests,
            "rows_per_decode": self.rows_per_decode,
            "out": out,
            **changes,
        }
        select_step(
            self.q, self.weights, self.k_cache, self.query_start, self.seq_lens,
            self.block_table, K, **arguments,
        )  # fmt: skip
        return out

    def faults(self, **changes: Any) -> list[RowFault]:
        arguments = {"pages": len(self.k_cache), "page_size": PAGE, **changes}
        return find_faults(self.query_start, self.seq_lens, self.block_table, **arguments)

    def naive(self) -> list[list[int]]:
        """Row by row, from loops that share nothing with the project (scores rounded to fp32)."""
        answers = []
        for request, (n, length) in enumerate(self.requests):
            table = self.block_table[request].tolist()
            keys, scales = naive.request_keys(self.k_cache, table, max(length, 0))
            first = int(self.query_start[request])
            for j in range(n):
                row = slice(first + j, first + j + 1)
                scores = naive.scores(self.q[row], keys, scales, self.weights[row])[0]
                rounded = torch.from_numpy(scores).float().tolist()
                answers.append(naive.top_k(rounded, K, 0, max(length - n + 1 + j, 0)))
        return answers


MIXED = [(1, 150), (1, 7), (5, 40), (30, 30), (3, 160)]


@pytest.mark.parametrize(
    ("requests", "decode"),
    [
        (MIXED, 2),
        (MIXED, 0),
        ([(2, 100), (2, 1), (2, 160)], 3),
        ([(2, 100), (4, 50)], 1),
        ([(1, 0), (3, 0), (2, 1)], 1),
    ],
    ids=["mixed", "all-as-prefill", "two-rows-a-decode", "decode-and-prefill", "nothing-to-see"],
)
def test_a_step_equals_loops(requests: list[tuple[int, int]], decode: int) -> None:
    batch = Batch(requests, decode)
    assert batch.select().tolist() == batch.naive()


def test_a_request_gets_the_same_bits_as_decode_and_as_prefill() -> None:
    batch = Batch(MIXED, 2)
    assert torch.equal(batch.select(), batch.select(decode_requests=0, rows_per_decode=0))


@pytest.mark.parametrize("workspace", [1, 20_000])
def test_the_workspace_changes_no_bit(workspace: int) -> None:
    batch = Batch(MIXED, 2)
    assert torch.equal(batch.select(), batch.select(workspace=workspace))


def test_a_bound_on_lengths_changes_no_bit() -> None:
    batch = Batch(MIXED, 2)
    assert torch.equal(batch.select(), batch.select(max_length=160))


def test_stages_are_told_for_decode_and_prefill() -> None:
    stages: list[str] = []
    Batch(MIXED, 2).select(on_stage=stages.append)
    assert stages == ["logits", "topk"] * 4  # the decode batch and three prefill requests


@pytest.mark.parametrize("decode", [2, 0])
@pytest.mark.parametrize("skipped", [[0], [1, 3], [0, 1, 2, 3, 4], [4]])
def test_skipped_requests_get_only_minus_one_and_others_are_right(
    decode: int, skipped: list[int]
) -> None:
    batch = Batch(MIXED, decode)
    expected = batch.select()
    batch.seq_lens[skipped] = 2**31 - 1
    batch.block_table[skipped] = 1 << 30
    ours = batch.select(skip_requests=skipped)
    for request in range(len(MIXED)):
        rows = slice(int(batch.query_start[request]), int(batch.query_start[request + 1]))
        wanted = torch.full_like(ours[rows], -1) if request in skipped else expected[rows]
        assert torch.equal(ours[rows], wanted)


def test_rows_of_no_request_get_only_minus_one() -> None:
    batch = Batch(MIXED, 2)
    expected = batch.select()
    batch.query_start, batch.seq_lens = batch.query_start[:-1], batch.seq_lens[:-1]
    batch.block_table = batch.block_table[:-1]
    ours = batch.select()
    assert torch.equal(ours[:-3], expected[:-3])
    assert (ours[-3:] == -1).all()


def test_right_inputs_have_no_faults() -> None:
    batch = Batch(MIXED, 2)
    batch.block_table[1, 1:] = 1 << 30  # past what 7 tokens need
    assert batch.faults(max_length=160, exact_seq_lens=batch.seq_lens.clone()) == []


def test_each_fault_is_found_with_what_was_expected_and_seen() -> None:
    batch = Batch(MIXED, 2)
    exact = batch.seq_lens.clone()
    batch.seq_lens[:3] = int32([-4, 8, 161])
    exact[0], exact[2] = -4, 161
    batch.block_table[3, 1] = len(batch.k_cache)
    batch.block_table[4, 9] = -1
    pages = len(batch.k_cache)
    assert batch.faults(exact_seq_lens=exact) == [
        RowFault(0, "negative_length", 0, -4),
        RowFault(1, "torn_input", 7, 8),
        RowFault(2, "length_out_of_bounds", 160, 161),
        RowFault(3, "page_out_of_bounds", pages, pages),
        RowFault(4, "page_out_of_bounds", pages, -1),
    ]


@pytest.mark.parametrize(
    ("changes", "bound"),
    [({"max_length": 159}, 159), ({"pages": 9}, 9 * PAGE)],
    ids=["the-steps-bound", "a-cache-shorter-than-the-table"],
)
def test_a_length_beyond_a_bound_is_found(changes: dict[str, int], bound: int) -> None:
    found = Batch([(1, 160)], 1).faults(**changes)
    assert [(fault.reason, fault.expected, fault.seen) for fault in found] == [
        ("length_out_of_bounds", bound, 160)
    ]


def test_query_offsets_that_run_backwards_are_torn() -> None:
    batch = Batch(MIXED, 0)
    batch.query_start[3] = 1
    assert batch.faults() == [RowFault(2, "query_offsets", 2, 1)]


def test_no_requests_have_no_faults() -> None:
    empty = int32([]).view(0, 0)
    assert find_faults(int32([0]), int32([]), empty, pages=5, page_size=PAGE) == []


WILD = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 200)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_garbage_is_survived_and_spares_the_other_requests(data: st.DataObject) -> None:
    batch = Batch(MIXED, data.draw(st.sampled_from([0, 2])))
    expected = batch.select()
    spoiled = data.draw(st.sets(st.integers(0, 4), min_size=1))
    for request in spoiled:
        batch.seq_lens[request] = data.draw(WILD)
        column = data.draw(st.integers(0, 9))
        batch.block_table[request, column] = data.draw(WILD)
    skipped = [fault.request for fault in batch.faults()]
    assert set(skipped) <= spoiled
    ours = batch.select(skip_requests=skipped)
    for request in range(len(MIXED)):
        rows = slice(int(batch.query_start[request]), int(batch.query_start[request + 1]))
        if request not in spoiled:
            assert torch.equal(ours[rows], expected[rows])
        if request in skipped:
            assert (ours[rows] == -1).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(WILD, min_size=6, max_size=6))
@example([0, 1, 2, -(2**31), 2**31 - 1, 2**31 - 1])
@example([2**31 - 1] * 6)
def test_any_query_offsets_are_survived(offsets: list[int]) -> None:
    batch = Batch(MIXED, 2)
    batch.query_start = int32(offsets)
    skipped = [fault.request for fault in batch.faults()]
    ours = batch.select(skip_requests=skipped)
    assert ((ours >= -1) & (ours < 160)).all()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("out", {"out": torch.zeros((3, K), dtype=torch.int32)}),
        ("decode_requests", {"decode_requests": 6}),
        ("decode_requests", {"decode_requests": -1}),
        ("rows_per_decode", {"rows_per_decode": 100}),
        ("skip_requests", {"skip_requests": [5]}),
        ("impl", {"impl": "other"}),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        Batch(MIXED, 2).select(**changes)


def enqueue(batch: Batch, **changes: Any) -> Tensor:
    """`enqueue_step`, of lengths that nothing is wrong with."""
    lengths = [length for _, length in batch.requests]
    ends = []
    for n, length in batch.requests:
        ends += [max(length - n + 1 + j, 0) for j in range(n)]
    out = torch.full((len(batch.q), K), 77, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "decode_requests": batch.decode_requests,
        "rows_per_decode": batch.rows_per_decode,
        "offsets": batch.query_start.tolist(),
        "length_bounds": lengths,
        "row_ends": int32(ends),
        "out": out,
        **changes,
    }
    enqueue_step(
        batch.q, batch.weights, batch.k_cache, batch.seq_lens, batch.block_table, K, **arguments
    )
    return out


@pytest.mark.parametrize("bound", [None, 160])
def test_a_step_without_host_reads_selects_the_same(bound: int | None) -> None:
    batch = Batch(MIXED, 2)
    bounds = {} if bound is None else {"length_bounds": [bound] * len(MIXED)}
    assert torch.equal(enqueue(batch, **bounds), batch.select())


def test_a_disabled_step_writes_nothing() -> None:
    assert (enqueue(Batch(MIXED, 2), enabled=int32([0])) == 77).all()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("offsets", {"offsets": [0, 1, 2, 7, 37, 41]}),
        ("offsets", {"offsets": [0, 1, 2, 7, 40]}),
        ("offsets", {"offsets": [0, 1, 3, 7, 37, 40]}),
        ("row_ends", {"row_ends": None}),
        ("row_ends", {"row_ends": int32([1])}),
    ],
)
def test_a_wrong_argument_of_a_step_without_host_reads_is_named(
    name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        enqueue(Batch(MIXED, 2), **changes)
