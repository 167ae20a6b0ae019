"""Faults that other indexers had, one small test each.

The numbers are of reports in vLLM (V), SGLang (S) and other projects; each test says in its
name what went wrong there.
"""

import pytest
import torch

from attention_worker.kernels import sparse_mla
from indexer_service.kernels import indexer, k_cache, mqa_logits, topk
from tests.kernels import inputs, naive


def assert_exact_values(scores: torch.Tensor, chosen: torch.Tensor, k: int) -> None:
    """The multiset of chosen scores is that of the k largest, and indices are unique."""
    expected = scores.sort(dim=1, descending=True).values[:, :k]
    ours = scores.gather(1, chosen.long()).sort(dim=1, descending=True).values
    assert torch.equal(ours, expected)
    assert (chosen.diff(dim=1) > 0).all()


def test_candidate_buffer_overflow_of_equal_coarse_keys() -> None:
    """S/36807, S/37591: more than 4096 scores fell into one fp16 bucket and some were lost."""
    source = torch.Generator().manual_seed(0)
    scores = 1.0 + torch.rand((2, 262_144), generator=source) * 1e-4  # one fp16 value, or two
    assert_exact_values(scores, topk.select(scores, 2048), 2048)


def test_scores_that_differ_in_low_mantissa_bits_only() -> None:
    """V/27568, V/26554: the last radix pass was wrong."""
    bits = torch.randint(0, 1 << 10, (4, 20_000), generator=torch.Generator().manual_seed(1))
    scores = (bits.to(torch.int32) | 0x3F900000).view(torch.float32)
    assert_exact_values(scores, topk.select(scores, 2048), 2048)


def test_k_above_the_width() -> None:
    """flashinfer/5187: 64 columns, k = 2048."""
    chosen = topk.select(torch.rand((3, 64)), 2048)
    assert torch.equal(chosen[:, :64], torch.arange(64, dtype=torch.int32).expand(3, 64))
    assert (chosen[:, 64:] == -1).all()


def test_membership_of_ties_at_rank_k_never_changes() -> None:
    """omlx/2243, S/31115, aiter/4415: which of the equal scores got in was a race."""
    scores = torch.rand((1, 131_072), generator=torch.Generator().manual_seed(2))
    order = scores[0].argsort(descending=True)
    scores[0, order[1988:2108]] = scores[0, order[2048]].clone()
    runs = [topk.select(scores, 2048) for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert runs[0].tolist() == [naive.top_k(scores[0].tolist(), 2048)]


def test_a_long_prefix_is_selected_from_not_just_counted() -> None:
    """S/24636, pypto-lib/592: 128 query rows took the short-sequence path, ignoring the prefix."""
    start, rows, k = 4096, 128, 2048
    bounds = [(0, start + 1 + row) for row in range(rows)]
    case = inputs.ragged(bounds, start + rows, heads=2, dim=16)
    chosen = indexer.select_ragged(*case.tensors, k)
    scores = mqa_logits.ragged(*case.tensors)
    for row in (0, 64, 127):
        assert chosen[row].tolist() == naive.top_k(scores[row].tolist(), k)
        assert int(chosen[row, -1]) >= k  # not arange


@pytest.mark.parametrize("batch", [32, 64])
def test_all_lengths_zero_in_a_full_batch(batch: int) -> None:
    """V/51970, V/51972, DeepGEMM 344, 353, 354: read outside the cache."""
    case = inputs.paged([0] * batch)
    case.block_table.fill_(1 << 30)
    assert (indexer.select_paged(*case.tensors, 8) == -1).all()


def test_lengths_that_are_not_contiguous() -> None:
    """V/42135: `context_lens[:, :2]` of a [8, 4] tensor was read as if it were contiguous."""
    case = inputs.paged([60] * 8, next_n=2)
    lengths = torch.randint(0, 61, (8, 4), dtype=torch.int32)
    case.seq_lens = lengths[:, :2]
    ours = indexer.select_paged(*case.tensors, 8)
    case.seq_lens = lengths[:, :2].contiguous()
    assert torch.equal(ours, indexer.select_paged(*case.tensors, 8))


def test_a_request_number_past_the_table() -> None:
    """V/55636, V/55637, V/55692: a padded row named a request that the table did not have."""
    count = torch.zeros(1, dtype=torch.int32)
    slots = sparse_mla.to_slots(
        torch.tensor([[5, 6], [5, 6]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([[3]], dtype=torch.int32),
        64,
        invalid_count=count,
    )
    assert slots.tolist() == [[3 * 64 + 5, 3 * 64 + 6], [-1, -1]]
    assert int(count) == 2


def test_planar_pages_score_like_flat_keys() -> None:
    """aiter/5591: 5968 of 6000 scores were wrong where scales lie behind a page's values."""
    case = inputs.paged([6000], heads=4, dim=128, page=64)
    keys, scales = naive.request_keys(case.k_cache, case.block_table[0].tolist(), 6000)
    bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([6000], dtype=torch.int32)
    flat = mqa_logits.ragged(case.q[0], keys, scales, case.weights, *bounds)
    assert torch.equal(mqa_logits.paged(*case.tensors, 6000), flat)


def test_an_indexer_cache_shorter_than_the_length() -> None:
    """S/31108: 4096 tokens, 4032 of them with index keys; stale keys were read."""
    case = inputs.paged([4032], heads=2, dim=16, page=64)
    with pytest.raises(ValueError, match=r"^seq_lens: length 4096, .* 4032 .*\(fix: "):
        k_cache.gather(case.k_cache, case.block_table, torch.tensor([4096], dtype=torch.int32))


def test_pages_whose_offset_passes_32_bits() -> None:
    """b12x/45: page 1994 at a stride of 1,077,120 bytes lies past 2^31. (Memory is virtual.)"""
    stride, pages, page, dim = 1_077_120, 1996, 64, 128
    buffer = torch.empty(stride * pages, dtype=torch.uint8)
    strided = buffer.as_strided((pages, page, dim + 4), (stride, dim + 4, 1))
    case = inputs.paged([256], heads=4, dim=dim, page=page)
    far = torch.tensor([[1993, 1994, 1995, 0]], dtype=torch.int32)
    strided[far[0].long()] = case.k_cache[case.block_table[0].long()]
    expected = mqa_logits.paged(*case.tensors, 256)
    ours = mqa_logits.paged(case.q, strided, case.weights, case.seq_lens, far, 256)
    assert torch.equal(ours, expected)

    k = torch.randn((1, dim)).to(torch.bfloat16)
    k_cache.insert(k, torch.tensor([1994 * page + 3]), strided)
    k_cache.insert(k, torch.tensor([int(case.block_table[0, 1]) * page + 3]), case.k_cache)
    length = torch.tensor([256], dtype=torch.int32)
    ours_keys = k_cache.gather(strided, far, length)[0].view(torch.uint8)
    keys = k_cache.gather(case.k_cache, case.block_table, length)[0].view(torch.uint8)
    assert torch.equal(ours_keys, keys)


def test_a_row_of_a_million_keys_in_one_mebibyte() -> None:
    """S/35217, TensorRT-LLM 15459, V/41063: out of memory, or a budget divided down to zero."""
    length, page, heads, dim, k = 1 << 20, 64, 2, 16, 2048
    case = inputs.paged([page * 512], heads=heads, dim=dim, page=page)
    case.block_table = case.block_table.repeat(1, length // (page * 512))  # every score 32 times
    case.seq_lens.fill_(length)
    small = indexer.select_paged(*case.tensors, k, workspace=1 << 20)
    scores = mqa_logits.paged(*case.tensors, length)
    assert torch.equal(small, topk.select(scores, k))
    assert_exact_values(scores, small, k)
