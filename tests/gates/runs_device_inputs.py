"""What is interpreted of device_inputs: the faults and the selection of `checked_copy`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from indexer_service.kernels.checked_inputs import CheckedInputs, checked_copy
from indexer_service.kernels.device_inputs import (
    DeviceInputs,
    copy_checked,
    faults_of,
    numbers_size,
    pack_numbers,
)
from indexer_service.kernels.step import enqueue_step, select_step
from tests.gates.kernels import Run
from tests.kernels import inputs

PAGE, HEADS, DIM, K = 64, 16, 64, 24
BUCKET = 8
GUARD = -77


@dataclass
class Case:
    """A step whose first requests are decode requests; a test spoils what was staged.

    `staged_*` is what the kernel reads, `exact_*` what the CPU knows.
    """

    rows_of: list[int] = field(default_factory=lambda: [1, 1, 1, 3, 40])
    lengths: list[int] = field(default_factory=lambda: [300, 7, 64, 90, 130])
    decode: int = 3
    columns: int = 6
    max_length: int = 310
    has_exact_lengths: bool = True
    has_exact_offsets: bool = True
    pages: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        source = torch.Generator().manual_seed(self.seed)
        self.offsets = [0, *accumulate(self.rows_of)]
        self.exact = list(self.lengths)
        self.query_start = torch.tensor(self.offsets, dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        shuffled = torch.randperm(self.pages, generator=source)[: self.requests * self.columns]
        self.table = shuffled.view(self.requests, self.columns).to(torch.int32)
        self.k_cache = inputs.k_cache(source, self.pages, PAGE, DIM)
        self.q = inputs.codes(source, self.rows, HEADS, DIM)
        self.weights = torch.randn((self.rows, HEADS), generator=source)

    @property
    def requests(self) -> int:
        return len(self.rows_of)

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @property
    def each(self) -> int:
        return self.rows_of[0] if self.decode else 0

    def reference(self) -> CheckedInputs:
        return checked_copy(
            self.query_start, self.seq_lens, self.table, rows=self.rows,
            decode_requests=self.decode, rows_per_decode=self.each, pages=self.pages,
            page_size=PAGE, max_length=self.max_length,
            exact_seq_lens=self.exact if self.has_exact_lengths else None,
            exact_query_start=self.offsets if self.has_exact_offsets else None,
        )  # fmt: skip

    def copied(self) -> tuple[DeviceInputs, Tensor]:
        numbers = torch.full((numbers_size(BUCKET),), GUARD, dtype=torch.int32)
        pack_numbers(
            numbers, rows=self.rows, requests=self.requests, decode_requests=self.decode,
            rows_per_decode=self.each, max_length=self.max_length,
            exact_lengths=self.exact if self.has_exact_lengths else None,
            exact_offsets=self.offsets if self.has_exact_offsets else None,
        )  # fmt: skip
        copy = DeviceInputs(BUCKET, self.columns + 2, torch.device("cpu"))
        for tensor in (copy.seq_lens, copy.block_table, copy.faults[:, :3]):
            tensor.fill_(GUARD)
        row_ends = torch.full((self.rows,), GUARD, dtype=torch.int32)
        copy_checked(
            copy, numbers, self.query_start, self.seq_lens, self.table, bucket=BUCKET,
            pages=self.pages, page_size=PAGE,
            row_ends=row_ends if self.has_exact_offsets else None,
        )  # fmt: skip
        return copy, row_ends


def _same_faults(spoil: Callable[[Case], None], wanted: str, **changes: object) -> None:
    """The kernel's faults, lengths and tables are the reference's; `wanted`: one reason of them."""
    case = Case(**changes)  # type: ignore[arg-type]
    spoil(case)
    expected = case.reference()
    assert {fault.reason for fault in expected.faults} == ({wanted} if wanted else set())
    copy, _ = case.copied()
    assert faults_of(copy.faults.tolist()) == expected.faults
    right = expected.seq_lens.clone()
    right[list(expected.skip_requests)] = 0
    assert torch.equal(copy.seq_lens[: case.requests], right)
    assert not copy.seq_lens[case.requests :].any()
    columns = expected.block_table.shape[1]
    assert torch.equal(copy.block_table[: case.requests, :columns], expected.block_table)
    assert (copy.block_table[:, columns:] == GUARD).all()
    assert (copy.block_table[case.requests :] == GUARD).all()


def _set(name: str, place: object, value: int) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        getattr(case, name)[place] = value

    return spoil


def _select(enabled: int, spoil: Callable[[Case], None] = lambda case: None) -> None:
    """A step's selection without a host read equals `select_step` on what was checked."""
    case = Case()
    spoil(case)
    checked = case.reference()
    expected = torch.full((case.rows, K), 77, dtype=torch.int32)
    select_step(
        case.q, case.weights, case.k_cache, checked.query_start, checked.seq_lens,
        checked.block_table, K, decode_requests=case.decode, rows_per_decode=case.each,
        max_length=case.max_length, skip_requests=checked.skip_requests, out=expected,
        impl="reference",
    )  # fmt: skip
    copy, row_ends = case.copied()
    assert (row_ends[: case.decode] == GUARD).all()
    out = torch.full_like(expected, 77)
    enqueue_step(
        case.q, case.weights, case.k_cache, copy.seq_lens[: case.requests],
        copy.block_table[: case.requests], K, decode_requests=case.decode,
        rows_per_decode=case.each, offsets=case.offsets,
        length_bounds=[case.max_length] * case.requests, row_ends=row_ends, out=out,
        enabled=torch.tensor([enabled], dtype=torch.int32), impl="triton",
    )  # fmt: skip
    assert torch.equal(out, expected) if enabled else bool((out == 77).all())


def _torn(case: Case) -> None:
    case.query_start[4] += 1
    case.table[1, 0] = -1


_NONE: Callable[[Case], None] = lambda case: None  # noqa: E731
_DECODE_ONLY = {"rows_of": [2, 2, 2], "lengths": [300, 7, 2], "decode": 3}

_CASES: dict[str, Callable[[], None]] = {
    "right": partial(_same_faults, _NONE, ""),
    "right, nothing exact": partial(
        _same_faults, _NONE, "", has_exact_lengths=False, has_exact_offsets=False
    ),
    "right, decode only": partial(_same_faults, _NONE, "", **_DECODE_ONLY),
    "torn length": partial(_same_faults, _set("seq_lens", 1, 8), "torn_input"),
    "torn length that is negative": partial(_same_faults, _set("seq_lens", 1, -8), "torn_input"),
    "torn decode offset": partial(_same_faults, _set("query_start", 1, 0), "query_offsets"),
    "torn prefill offset": partial(
        _same_faults, _set("query_start", 4, 2**31 - 1), "query_offsets"
    ),
    "torn last offset": partial(_same_faults, _set("query_start", 5, -(2**31)), "query_offsets"),
    "negative length": partial(
        _same_faults, _set("seq_lens", 3, -1), "negative_length", has_exact_lengths=False
    ),
    "least length": partial(
        _same_faults, _set("seq_lens", 3, -(2**31)), "negative_length", has_exact_lengths=False
    ),
    "length beyond the bound": partial(
        _same_faults, _set("seq_lens", 0, 311), "length_out_of_bounds", has_exact_lengths=False
    ),
    "length beyond the cache": partial(
        _same_faults, _NONE, "length_out_of_bounds", rows_of=[1], lengths=[300], decode=1, pages=4,
        columns=4,
    ),
    "greatest length": partial(
        _same_faults, _set("seq_lens", 4, 2**31 - 1), "length_out_of_bounds",
        has_exact_lengths=False,
    ),
    "page beyond the cache": partial(_same_faults, _set("table", (0, 4), 40), "page_out_of_bounds"),
    "negative page": partial(_same_faults, _set("table", (4, 2), -1), "page_out_of_bounds"),
    "wrong pages: the first counts": partial(
        _same_faults, _set("table", (0, slice(1, 4)), 2**31 - 1), "page_out_of_bounds"
    ),
    "wrong page that no length needs": partial(_same_faults, _set("table", (1, 1), -1), ""),
    "a table wider than a block": partial(
        _same_faults, _set("table", (0, 1200), 9999), "page_out_of_bounds", rows_of=[1],
        lengths=[1250 * PAGE], decode=1, columns=1300, pages=1300, max_length=1300 * PAGE,
    ),
    "selects": partial(_select, 1),
    "selects beside torn requests": partial(_select, 1, _torn),
    "selects nothing when disabled": partial(_select, 0),
}  # fmt: skip

RUNS = [Run(f"device_inputs {name}", check) for name, check in _CASES.items()]
