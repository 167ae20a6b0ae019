"""topk.select against a sort, and each promise of its contract by itself."""

import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer_service.kernels import topk
from indexer_service.kernels.topk import plan
from tests.kernels import inputs, naive

INF = math.inf
TRICKY = [0.0, -0.0, 1.0, -1.0, INF, -INF, math.nan, 1e-45, -1e-45, 3.4e38, 1.0000001]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], int, list[int], list[int]]:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(0, 24))
    value = st.one_of(st.sampled_from(TRICKY), st.floats(width=32))
    scores = [draw(st.lists(value, min_size=width, max_size=width)) for _ in range(rows)]
    bound = st.integers(-3, width + 3)
    bounds = [draw(st.lists(bound, min_size=rows, max_size=rows)) for _ in range(2)]
    return scores, draw(st.integers(1, 30)), bounds[0], bounds[1]


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_scores_and_bounds_give_what_a_sort_gives(
    case: tuple[list[list[float]], int, list[int], list[int]],
) -> None:
    rows, k, starts, ends = case
    scores = torch.tensor(rows, dtype=torch.float32).view(len(rows), -1)
    start = torch.tensor(starts, dtype=torch.int32)
    end = torch.tensor(ends, dtype=torch.int32)
    exact = scores.tolist()
    assert topk.select(scores, k).tolist() == [naive.top_k(row, k) for row in exact]
    assert topk.select(scores, k, start, end).tolist() == [
        naive.top_k(row, k, starts[r], ends[r]) for r, row in enumerate(exact)
    ]
    assert topk.select(scores, k, None, end).tolist() == [
        naive.top_k(row, k, 0, ends[r]) for r, row in enumerate(exact)
    ]
    assert topk.select(scores, k, start).tolist() == [
        naive.top_k(row, k, starts[r]) for r, row in enumerate(exact)
    ]


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([3.0, 9.0, 5.0, 7.0], 2, [1, 3]),
        ([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
        ([1.0, 5.0, 2.0, 5.0, 5.0], 2, [1, 3]),
        ([-0.0, 0.0, -0.0], 2, [0, 1]),
        ([math.nan, 1.0, -INF, 2.0], 4, [1, 3, -1, -1]),
        ([INF, math.nan, INF, 1.0], 2, [0, 2]),
        ([-INF, -INF], 1, [-1]),
        ([1.0], 3, [0, -1, -1]),
        ([], 2, [-1, -1]),
    ],
    ids=[
        "largest-in-order-of-index", "ties-lowest-index", "ties-at-the-threshold",
        "minus-zero-equals-zero", "nan-and-minus-inf-never", "plus-inf-chosen",
        "nothing-to-choose", "k-above-width", "no-columns",
    ],
)  # fmt: skip
def test_one_row(row: list[float], k: int, expected: list[int]) -> None:
    assert topk.select(torch.tensor([row], dtype=torch.float32), k).tolist() == [expected]


def test_indices_are_relative_to_the_row_start() -> None:
    scores = torch.tensor([[9.0, 1.0, 5.0, 7.0, 9.0]] * 3)
    start = torch.tensor([1, 2, 4], dtype=torch.int32)
    end = torch.tensor([5, 4, 4], dtype=torch.int32)
    assert topk.select(scores, 2, start, end).tolist() == [[2, 3], [0, 1], [-1, -1]]


def test_a_strided_view_of_scores_and_of_out() -> None:
    scores = torch.randn((5, 40), generator=torch.Generator().manual_seed(1))
    expected = topk.select(scores[:, 3:33].contiguous(), 8)
    out, larger = inputs.inside_larger_rows(expected, 77)
    topk.select(scores[:, 3:33], 8, out=out)
    assert torch.equal(out, expected)
    assert (larger[:, :2] == 77).all()
    assert (larger[:, -3:] == 77).all()


def test_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads() -> None:
    scores = torch.randn((16, 20_000), generator=torch.Generator().manual_seed(2)).round(decimals=1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(topk.select(scores, 512))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    alone = torch.cat([topk.select(row.unsqueeze(0), 512) for row in scores])
    assert torch.equal(alone, results[0])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("scores", {"scores": torch.zeros(3)}),
        ("scores", {"scores": torch.zeros((3, 4), dtype=torch.float64)}),
        ("scores", {"scores": torch.zeros((4, 3)).T}),
        ("k", {"k": 0}),
        ("k", {"k": True}),
        ("row_start", {"row_start": torch.zeros(2, dtype=torch.int32)}),
        ("row_end", {"row_end": torch.zeros(3, dtype=torch.int64)}),
        ("out", {"out": torch.zeros((3, 3), dtype=torch.int32)}),
        ("out", {"out": torch.zeros((3, 2), dtype=torch.int64)}),
        ("impl", {"impl": "cuda"}),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(name: str, arguments: dict[str, object]) -> None:
    good = {"scores": torch.zeros((3, 4)), "k": 2}
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        topk.select(**{**good, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 7, 64, 132, 133, 5000])
@pytest.mark.parametrize("longest", [1, 8192, 8193, 16_385, 65_536, 1 << 20, 1 << 30])
@pytest.mark.parametrize("k", [1, 2048, 4096, 10_000])
def test_a_plan_fits_the_gpu_and_what_it_says_about_memory(rows: int, longest: int, k: int) -> None:
    chosen = plan.choose(rows, longest, k, processors=132)
    assert chosen.sizes in plan.CONFIGURATIONS
    assert 1 <= chosen.splits <= plan.MOST_SPLITS
    assert chosen.programs * chosen.splits <= max(132, min(2 * 132, rows))
    assert chosen.programs == rows or chosen.splits == 1
    needed = chosen.programs * chosen.splits * (chosen.capacity * 8 + 4)
    assert needed == plan.candidate_bytes(rows, longest, k, processors=132)
    if longest > chosen.sizes.small and k <= chosen.sizes.capacity:
        assert min(longest, chosen.sizes.capacity) <= chosen.capacity <= chosen.sizes.capacity
    else:
        assert chosen.capacity <= plan.GROUP


def test_no_plan_expects_more_candidates_than_it_has_registers_for() -> None:
    for longest in (9000, 65_536, 1 << 18, 1 << 20):
        for k in (512, 1024, 2048, 4096):
            sizes = plan.choose(8, longest, k, processors=132).sizes
            assert plan.most_candidates(longest, k, sizes) <= sizes.tile


def test_short_rows_are_never_split() -> None:
    for longest in (0, 4096, 8192, 16_384):
        assert plan.choose(1, longest, 2048, processors=132).splits == 1
    assert plan.candidate_bytes(1, 16_384, 2048, processors=132) < 100


@pytest.mark.parametrize("k", [1, 16, 512, 2048, 4096, 8192, 10_000])
def test_the_lengths_for_warm_up_need_every_kernel_that_others_do(k: int) -> None:
    def kernels(lengths: Iterable[int]) -> set[plan.Sizes]:
        return {plan.choose(8, length, k, processors=132).sizes for length in lengths}

    powers = {1 << exponent for exponent in range(32)}
    others = powers | {power + 1 for power in powers} | set(range(1, 1 << 20, 997))
    assert kernels(others) == kernels(plan.LENGTHS)
