"""Faults that other indexers had, one small check each, for any device and implementation.

The numbers are of reports in vLLM (V), SGLang (S) and other projects; each check's name says what
went wrong there. `test_peer_faults.py` runs them on the CPU and on a GPU, the gates without a GPU
run those that are small enough in Triton's interpreter. What a service has to refuse stands in
tests/service: an unsupported page size in test_bad_sessions.py (aiter 5591, V 39303, V 53635), a K
cache shorter than the plan's lengths in test_bad_plans.py (S 31108). Layers that share a selection
(ATOM 1260) and a table's width (V 46514) are checked through a service as well, in
tests/client/test_shared_layers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_worker.kernels import sparse_mla
from indexer_service.kernels import indexer, k_cache, mqa_logits, topk
from indexer_service.kernels.lengths import row_lengths
from tests.kernels import inputs, naive


@dataclass(frozen=True)
class Where:
    """What runs a check: a device, an implementation, and whether it is a slow one."""

    device: str
    impl: str
    interpreted: bool = False

    def tensor(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def paged(self, case: inputs.Paged) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in case.tensors)

    def ragged(self, case: inputs.Ragged) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in case.tensors)

    def top_k(self, scores: Tensor, k: int) -> Tensor:
        return topk.select(scores.to(self.device), k, impl=self.impl).cpu()

    def size(self, usual: int, interpreted: int) -> int:
        return interpreted if self.interpreted else usual


def assert_exact_values(scores: Tensor, chosen: Tensor, k: int) -> None:
    """The multiset of chosen scores is that of the k largest, and indices are unique."""
    expected = scores.sort(dim=1, descending=True).values[:, :k]
    ours = scores.gather(1, chosen.long()).sort(dim=1, descending=True).values
    assert torch.equal(ours, expected)
    assert (chosen.diff(dim=1) > 0).all()


def candidate_buffer_overflow_of_equal_coarse_keys(where: Where) -> None:
    """S/36807, S/37591: more than 4096 scores fell into one fp16 bucket and some were lost."""
    rows, width = where.size(64, 1), where.size(262_144, 20_000)
    source = torch.Generator().manual_seed(0)
    scores = 1.0 + torch.rand((rows, width), generator=source) * 1e-4  # one fp16 value, or two
    assert_exact_values(scores, where.top_k(scores, 2048), 2048)


def scores_that_differ_in_low_mantissa_bits_only(where: Where) -> None:
    """V/27568, V/26554: the last radix pass was wrong."""
    shape = (where.size(4, 1), 20_000)
    bits = torch.randint(0, 1 << 10, shape, generator=torch.Generator().manual_seed(1))
    scores = (bits.to(torch.int32) | 0x3F900000).view(torch.float32)
    assert_exact_values(scores, where.top_k(scores, 2048), 2048)


def k_above_the_width(where: Where) -> None:
    """flashinfer/5187: 64 columns, k = 2048."""
    chosen = where.top_k(torch.rand((3, 64)), 2048)
    assert torch.equal(chosen[:, :64], torch.arange(64, dtype=torch.int32).expand(3, 64))
    assert (chosen[:, 64:] == -1).all()


def membership_of_ties_at_rank_k_never_changes(where: Where) -> None:
    """omlx/2243, S/31115, aiter/4415: which of the equal scores got in was a race."""
    width, repeats = where.size(131_072, 16_384), where.size(20, 2)
    scores = torch.rand((1, width), generator=torch.Generator().manual_seed(2))
    order = scores[0].argsort(descending=True)
    scores[0, order[1988:2108]] = scores[0, order[2048]].clone()
    runs = [where.top_k(scores, 2048) for _ in range(repeats)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert runs[0].tolist() == [naive.top_k(scores[0].tolist(), 2048)]


def scores_that_change_from_run_to_run(where: Where) -> None:
    """DeepGEMM/392: logits differed between repeats; 20 of them must be equal to the bit."""
    longest, heads = where.size(512, 90), where.size(64, 16)
    lengths = [longest // 2, 33, longest]
    case = where.paged(inputs.paged(lengths, next_n=2, heads=heads, dim=128, page=64))
    runs = [mqa_logits.paged(*case, longest, impl=where.impl) for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def a_long_prefix_is_selected_from_not_just_counted(where: Where) -> None:
    """S/24636, pypto-lib/592: 128 query rows took the short-sequence path, ignoring the prefix."""
    start, rows, k = where.size(4096, 512), where.size(128, 4), where.size(2048, 256)
    bounds = [(0, start + 1 + row) for row in range(rows)]
    case = where.ragged(inputs.ragged(bounds, start + rows, heads=16, dim=where.size(128, 64)))
    chosen = indexer.select_ragged(*case, k, impl=where.impl).cpu()
    scores = mqa_logits.ragged(*case, impl=where.impl).cpu()
    for row in (0, rows // 2, rows - 1):
        assert chosen[row].tolist() == naive.top_k(scores[row].tolist(), k)
        assert int(chosen[row, -1]) >= k  # not arange


def all_lengths_zero_in_a_full_batch(where: Where) -> None:
    """V/51970, V/51972, DeepGEMM 344, 353, 354: read outside the cache."""
    for batch in (32, 64):
        case = inputs.paged([0] * batch, heads=16, dim=64)
        case.block_table.fill_(1 << 30)
        chosen = indexer.select_paged(*where.paged(case), 8, impl=where.impl)
        assert (chosen == -1).all()


def lengths_that_are_not_contiguous(where: Where) -> None:
    """V/42135: `context_lens[:, :2]` of a [8, 4] tensor was read as if it were contiguous."""
    q, cache, weights, _, table = where.paged(inputs.paged([60] * 8, next_n=2, heads=16, dim=64))
    lengths = torch.randint(0, 61, (8, 4), dtype=torch.int32).to(where.device)[:, :2]
    ours, expected = (
        indexer.select_paged(q, cache, weights, seq_lens, table, 8, impl=where.impl)
        for seq_lens in (lengths, lengths.contiguous())
    )
    assert torch.equal(ours, expected)


def a_request_number_past_the_table(where: Where) -> None:
    """V/55636, V/55637, V/55692: a padded row named a request that the table did not have."""
    count = where.tensor([0])
    slots = sparse_mla.to_slots(
        where.tensor([[5, 6], [5, 6]]), where.tensor([0, 1]), where.tensor([[3]]), 64,
        invalid_count=count, impl=where.impl,
    )  # fmt: skip
    assert slots.tolist() == [[3 * 64 + 5, 3 * 64 + 6], [-1, -1]]
    assert int(count) == 2


def planar_pages_score_like_flat_keys(where: Where) -> None:
    """aiter/5591: 5968 of 6000 scores were wrong where scales lie behind a page's values."""
    length = where.size(6000, 200)
    case = inputs.paged([length], heads=16, dim=128, page=64)
    keys, scales = naive.request_keys(case.k_cache, case.block_table[0].tolist(), length)
    tensors = where.paged(case)
    flat = mqa_logits.ragged(
        tensors[0][0], keys.to(where.device), scales.to(where.device), tensors[2],
        where.tensor([0]), where.tensor([length]), impl=where.impl,
    )  # fmt: skip
    paged = mqa_logits.paged(*tensors, length, impl=where.impl)
    assert float((paged - flat).norm() / flat.norm()) <= 5e-4  # two kernels round in two orders


def layers_that_share_a_selection_use_that_of_this_forward(where: Where) -> None:
    """ATOM/1260, ik_llama.cpp/2063, Megatron/6020, S/33197: the last forward's was reused."""
    k, buffer = 16, where.tensor([[-1] * 16] * 2)
    seen: list[list[Tensor]] = []
    for forward in range(2):
        used = []
        for layer, pattern in enumerate("FSSSFSSS"):
            if pattern == "F":
                case = inputs.paged([90, 40], heads=16, dim=64, seed=10 * forward + layer)
                indexer.select_paged(*where.paged(case), k, out=buffer, impl=where.impl)
            used.append(buffer.clone())
        seen.append(used)
    for used in seen:
        assert all(torch.equal(used[layer], used[layer // 4 * 4]) for layer in range(8))
        assert not torch.equal(used[3], used[4])
    assert not torch.equal(seen[1][1], seen[0][1])


def pages_whose_offset_passes_32_bits(where: Where) -> None:
    """b12x/45, xpu-kernels/445: page 1994 at a stride of 1,077,120 bytes lies past 2^31."""
    stride, pages, page, dim = 1_077_120, 1996, 64, 128
    buffer = torch.empty(stride * pages, dtype=torch.uint8, device=where.device)
    strided = buffer.as_strided((pages, page, dim + 4), (stride, dim + 4, 1))
    q, cache, weights, lengths, table = where.paged(
        inputs.paged([256], heads=16, dim=dim, page=page)
    )
    far = where.tensor([[1993, 1994, 1995, 0]])
    strided[far[0].long()] = cache[table[0].long()]
    expected = mqa_logits.paged(q, cache, weights, lengths, table, 256, impl=where.impl)
    ours = mqa_logits.paged(q, strided, weights, lengths, far, 256, impl=where.impl)
    assert torch.equal(ours, expected)

    k = torch.randn((1, dim)).to(torch.bfloat16).to(where.device)
    for target, number in ((strided, 1994), (cache, int(table[0, 1]))):
        slot = where.tensor([number * page + 3], torch.int64)
        k_cache.insert(k, slot, target, impl=where.impl)
    (ours_keys, ours_scales), (keys, scales) = (
        k_cache.gather(target, numbers, lengths, impl=where.impl)
        for target, numbers in ((strided, far), (cache, table))
    )
    assert torch.equal(ours_keys.view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(ours_scales, scales)


def a_row_larger_than_the_workspace(where: Where) -> None:
    """S/35217, TensorRT-LLM 15459, V/41063: out of memory, or a budget divided down to zero."""
    length, workspace = where.size(1 << 20, 1 << 10), where.size(1 << 20, 1 << 14)
    page, k = 64, where.size(2048, 64)
    case = inputs.paged([length // 32], heads=16, dim=where.size(128, 64), page=page)
    case.block_table = case.block_table.repeat(1, 32)  # every score 32 times
    case.seq_lens.fill_(length)
    tensors = where.paged(case)
    small = indexer.select_paged(*tensors, k, workspace=workspace, impl=where.impl)
    scores = mqa_logits.paged(*tensors, length, impl=where.impl)
    assert torch.equal(small, topk.select(scores, k, impl=where.impl))
    assert_exact_values(scores.cpu(), small.cpu(), k)


def a_padded_batch_of_one_length_each(where: Where) -> None:
    """V/46514: table and lengths were sized by two formulas; here one says what a row sees."""
    lengths = where.tensor([65, 64, 1])  # not multiples of a page, one exactly
    case = inputs.paged([65, 64, 1], next_n=2, heads=16, dim=64, page=64)
    q, cache, weights, _, table = where.paged(case)
    assert table.shape[1] == 2
    both_forms = [
        indexer.select_paged(q, cache, weights, seq_lens, table, 128, impl=where.impl).cpu()
        for seq_lens in (lengths, row_lengths(lengths, 2))
    ]
    assert torch.equal(*both_forms)
    assert (both_forms[0] >= 0).sum(1).tolist() == [64, 65, 63, 64, 0, 1]


CHECKS: list[Callable[[Where], None]] = [
    candidate_buffer_overflow_of_equal_coarse_keys,
    scores_that_differ_in_low_mantissa_bits_only,
    k_above_the_width,
    membership_of_ties_at_rank_k_never_changes,
    scores_that_change_from_run_to_run,
    a_long_prefix_is_selected_from_not_just_counted,
    all_lengths_zero_in_a_full_batch,
    lengths_that_are_not_contiguous,
    a_request_number_past_the_table,
    planar_pages_score_like_flat_keys,
    layers_that_share_a_selection_use_that_of_this_forward,
    a_padded_batch_of_one_length_each,
    pages_whose_offset_passes_32_bits,
    a_row_larger_than_the_workspace,
]
