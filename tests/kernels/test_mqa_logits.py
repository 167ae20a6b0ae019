"""mqa_logits: against float64 loops, and the promise that a score's bits depend on nothing else."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from indexer_service.kernels import k_cache, mqa_logits
from indexer_service.kernels.mqa_logits import reference
from tests.kernels import inputs, naive

EVERY_CODE = range(256)
NAN_CODES = {0x7F, 0xFF}


@pytest.mark.parametrize(
    ("next_n", "heads", "dim", "page"),
    [(1, 64, 128, 64), (2, 32, 128, 64), (3, 5, 32, 16), (1, 1, 16, 1), (1, 12, 64, 32)],
)
def test_paged_scores_equal_float64_loops(next_n: int, heads: int, dim: int, page: int) -> None:
    lengths = [100, 37, 64]
    case = inputs.paged(lengths, next_n=next_n, heads=heads, dim=dim, page=page)
    ours = mqa_logits.paged(*case.tensors, 110)
    for request, length in enumerate(lengths):
        keys, scales = naive.request_keys(case.k_cache, case.block_table[request].tolist(), length)
        rows = slice(request * next_n, (request + 1) * next_n)
        theirs = naive.scores(case.q[request], keys, scales, case.weights[rows])
        for j in range(next_n):
            seen = length - next_n + 1 + j
            row = ours[request * next_n + j]
            assert torch.isneginf(row[seen:]).all()
            torch.testing.assert_close(
                row[:seen].double(), torch.from_numpy(theirs[j, :seen]), rtol=1e-7, atol=1e-5
            )


def test_ragged_scores_equal_float64_loops() -> None:
    bounds = [(0, 50), (10, 200), (199, 200), (150, 150), (120, 20), (-5, 999)]
    case = inputs.ragged(bounds, 200)
    ours = mqa_logits.ragged(*case.tensors)
    theirs = torch.from_numpy(naive.scores(case.q, case.k, case.k_scale, case.weights))
    for row, (start, end) in enumerate(bounds):
        seen = torch.zeros(200, dtype=torch.bool)
        seen[max(start, 0) : max(end, 0)] = True
        assert torch.isneginf(ours[row][~seen]).all()
        torch.testing.assert_close(
            ours[row][seen].double(), theirs[row][seen], rtol=1e-7, atol=1e-5
        )


@pytest.mark.parametrize("heads", [1, 2, 5, 12, 64])
def test_bits_are_those_of_decision_0001(heads: int) -> None:
    case = inputs.ragged([(0, 12)], 12, heads=heads, dim=128)
    case.k_scale = torch.rand(12, generator=torch.Generator().manual_seed(1))
    ours = mqa_logits.ragged(*case.tensors)[0]
    queries, keys = naive.e4m3(case.q[0]).tolist(), naive.e4m3(case.k).tolist()
    for key, scale in enumerate(case.k_scale.tolist()):
        terms = []
        for query, weight in zip(queries, case.weights[0].tolist(), strict=True):
            exact = sum(Fraction(a) * Fraction(b) for a, b in zip(query, keys[key], strict=True))
            terms.append(max(float(exact), 0.0) * weight)
            assert Fraction(float(exact)) == exact
        while len(terms) > 1:
            half = 1
            while 2 * half < len(terms):
                half *= 2
            terms = [
                terms[i] + (terms[half + i] if half + i < len(terms) else 0.0) for i in range(half)
            ]
        assert ours[key] == torch.tensor(terms[0] * scale, dtype=torch.float64).to(torch.float32)


def test_a_row_alone_has_the_bits_it_has_in_a_batch() -> None:
    case = inputs.paged([3000, 1, 700, 2999], next_n=2, heads=64, dim=128, page=64)
    together = mqa_logits.paged(*case.tensors, 3000)
    for request in range(4):
        one, rows = slice(request, request + 1), slice(2 * request, 2 * request + 2)
        alone = mqa_logits.paged(
            case.q[one], case.k_cache, case.weights[rows], case.seq_lens[one],
            case.block_table[one], 3000,
        )  # fmt: skip
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("tile_bytes", [1, 40_000, 1 << 22])
def test_bits_do_not_depend_on_tiles(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = inputs.paged([500, 77], next_n=2, heads=12, dim=64, page=16)
    ragged = inputs.ragged([(0, 300), (5, 299), (200, 300)], 300, heads=12, dim=64)
    expected = mqa_logits.paged(*paged.tensors, 500), mqa_logits.ragged(*ragged.tensors)
    monkeypatch.setattr(reference, "TILE_BYTES", tile_bytes)
    assert torch.equal(mqa_logits.paged(*paged.tensors, 500), expected[0])
    assert torch.equal(mqa_logits.ragged(*ragged.tensors), expected[1])


def test_bits_do_not_depend_on_threads() -> None:
    case = inputs.paged([2000, 1500], heads=64, dim=128, page=64)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(mqa_logits.paged(*case.tensors, 2000))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_bits_do_not_depend_on_the_window_of_keys() -> None:
    case = inputs.paged([400], page=16)
    whole = mqa_logits.paged(*case.tensors, 400)
    for begin in (16, 160, 384):
        window = mqa_logits.paged(
            case.q, case.k_cache, case.weights, case.seq_lens - begin,
            case.block_table[:, begin // 16 :], 400 - begin,
        )  # fmt: skip
        assert torch.equal(window, whole[:, begin:])


def test_paged_and_ragged_give_the_same_bits() -> None:
    case = inputs.paged([321], next_n=3, heads=64, dim=128, page=64)
    values, scales = k_cache.gather(case.k_cache, case.block_table, case.seq_lens)
    ends = torch.tensor([319, 320, 321], dtype=torch.int32)
    ragged = mqa_logits.ragged(
        case.q[0], values, scales, case.weights, torch.zeros_like(ends), ends
    )
    assert torch.equal(mqa_logits.paged(*case.tensors, 321), ragged)


def test_lengths_of_each_row_mean_the_same_as_the_length_after_the_last() -> None:
    case = inputs.paged([50, 1, 0], next_n=2)
    per_row = torch.tensor([[49, 50], [0, 1], [-1, 0]], dtype=torch.int32)
    expected = mqa_logits.paged(*case.tensors, 50)
    case.seq_lens = per_row
    assert torch.equal(mqa_logits.paged(*case.tensors, 50), expected)
    assert torch.isneginf(expected[4:]).all()


@pytest.mark.parametrize("as_float8", [False, True], ids=["bytes", "float8"])
def test_e4m3_may_come_as_bytes_or_as_float8(as_float8: bool) -> None:
    case = inputs.ragged([(0, 30)], 30)
    expected = mqa_logits.ragged(*case.tensors)
    if as_float8:
        case.q, case.k = case.q.view(torch.float8_e4m3fn), case.k.view(torch.float8_e4m3fn)
    assert torch.equal(mqa_logits.ragged(*case.tensors), expected)


def test_every_code_in_a_key_scores_its_own_value_and_nan_spoils_that_key_alone() -> None:
    case = inputs.ragged([(0, 256), (3, 250)], 256, heads=64, dim=128)
    case.k[:, 17] = torch.arange(256, dtype=torch.uint8)
    ours = mqa_logits.ragged(*case.tensors)
    theirs = torch.from_numpy(naive.scores(case.q, case.k, case.k_scale, case.weights))
    assert {code for code in EVERY_CODE if ours[0, code].isnan()} == NAN_CODES
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-7, atol=1e-4, equal_nan=True)
    assert torch.isneginf(ours[1, 250:]).all()  # a NaN outside the bounds is hidden too


def test_every_code_in_a_query_scores_its_own_value_and_nan_spoils_that_row_alone() -> None:
    case = inputs.ragged([(0, 70)] * 256, 70, heads=4, dim=32)
    case.q[:, 2, 5] = torch.arange(256, dtype=torch.uint8)
    ours = mqa_logits.ragged(*case.tensors)
    theirs = torch.from_numpy(naive.scores(case.q, case.k, case.k_scale, case.weights))
    assert {code for code in EVERY_CODE if ours[code].isnan().any()} == NAN_CODES
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-7, atol=1e-4, equal_nan=True)


def test_nan_scale_or_weight_spoils_its_key_or_row_alone() -> None:
    case = inputs.ragged([(0, 20), (0, 20)], 20)
    case.k_scale[3] = torch.nan
    case.weights[1, 0] = torch.nan
    ours = mqa_logits.ragged(*case.tensors).isnan()
    assert ours[0].nonzero().flatten().tolist() == [3]
    assert ours[1].all()


def test_keys_past_the_table_are_minus_infinity_and_pages_outside_the_cache_nan() -> None:
    case = inputs.paged([64], page=16)
    case.seq_lens[0] = 1000
    case.block_table[0, 1] = len(case.k_cache)
    case.block_table[0, 2] = -7
    row = mqa_logits.paged(*case.tensors, 100)[0]
    assert row[:16].isfinite().all()
    assert row[16:48].isnan().all()
    assert row[48:64].isfinite().all()
    assert torch.isneginf(row[64:]).all()


def test_output_view_within_larger_rows_is_written_whole_and_nothing_beside_it() -> None:
    case = inputs.paged([40, 0])
    expected = mqa_logits.paged(*case.tensors, 50)
    out, larger = inputs.inside_larger_rows(expected, 77.0)
    assert mqa_logits.paged(*case.tensors, 50, out=out) is out
    assert torch.equal(out, expected)
    assert (larger[:, :2] == 77).all()
    assert (larger[:, -3:] == 77).all()


@pytest.mark.parametrize("next_n", [1, 2])
def test_no_requests_give_no_rows(next_n: int) -> None:
    case = inputs.paged([], next_n=next_n)
    assert mqa_logits.paged(*case.tensors, 10).shape == (0, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros((2, 1, 8, 31), dtype=torch.uint8)),
        ("q", torch.zeros((2, 1, 8, 32))),
        ("q", torch.zeros((2, 8, 32), dtype=torch.uint8)),
        ("weights", torch.zeros((2, 9))),
        ("weights", torch.zeros((2, 8), dtype=torch.float64)),
        ("seq_lens", torch.zeros(3, dtype=torch.int32)),
        ("seq_lens", torch.zeros(2, dtype=torch.int64)),
        ("seq_lens", torch.zeros((2, 2), dtype=torch.int32)),
        ("block_table", torch.zeros((3, 4), dtype=torch.int32)),
        ("k_cache", torch.zeros((4, 36, 16), dtype=torch.uint8).transpose(1, 2)),
        ("k_cache", torch.zeros((4, 16, 36))),
        ("out", torch.zeros((2, 21))),
        ("out", torch.zeros((20, 2)).T),
        ("max_context", -1),
        ("impl", "triton9"),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(name: str, value: Any) -> None:
    case = inputs.paged([20, 10])
    arguments: dict[str, Any] = {**vars(case), "max_context": 20, name: value}
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        mqa_logits.paged(**arguments)
