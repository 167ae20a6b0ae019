"""The fused indexer on a GPU: windows, captured graphs, repeats; the selection is never another."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import indexer, mqa_logits, topk
from tests.data.recording import TOP_K, Recording
from tests.kernels import inputs

pytestmark = pytest.mark.gpu

HEADS, DIM, PAGE, K = 64, 128, 64, 512
LENGTHS = [9000, 0, 77, 30_000, 1, 2048, -3, 12_345]


def paged(lengths: list[int], next_n: int = 1, seed: int = 0) -> list[Tensor]:
    case = inputs.paged(lengths, next_n=next_n, heads=HEADS, dim=DIM, page=PAGE, seed=seed)
    return [tensor.cuda() for tensor in case.tensors]


def expected(tensors: list[Tensor], width: int, k: int = K) -> Tensor:
    """The reference's selection from the same scores."""
    scores = mqa_logits.paged(*tensors, width, impl="triton")
    return topk.select(scores.cpu(), k, impl="reference").cuda()


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("workspace", [None, 1 << 20, 600_000, 70_000])
def test_windows_select_the_same_bits(workspace: int | None, next_n: int, form: str | None) -> None:
    tensors = paged(LENGTHS, next_n)
    out = torch.full((len(LENGTHS) * next_n, K), 77, dtype=torch.int32, device="cuda")
    indexer.select_paged(*tensors, K, out=out, workspace=workspace, impl="triton")
    assert torch.equal(out, expected(tensors, max(LENGTHS)))


@pytest.mark.parametrize("workspace", [None, 1 << 20, 70_000])
def test_ragged_rows_in_blocks_select_the_same_bits(
    workspace: int | None, form: str | None
) -> None:
    bounds = [(row % 7, 3000 + 57 * row) for row in range(300)] + [(5, 5), (9, 2), (-3, 10**6)]
    case = inputs.ragged(bounds, 18_000, heads=HEADS, dim=DIM)
    tensors = [tensor.cuda() for tensor in case.tensors]
    scores = mqa_logits.ragged(*tensors, impl="triton")
    right = topk.select(
        scores.cpu(), K, case.row_start, case.row_end, impl="reference"
    )  # fmt: skip
    ours = indexer.select_ragged(*tensors, K, workspace=workspace, impl="triton")
    assert torch.equal(ours.cpu(), right)


def test_bounds_that_are_not_contiguous(form: str | None) -> None:
    case = inputs.ragged([(row % 7, 300 + 57 * row) for row in range(40)], 3000, heads=HEADS)
    q, k, k_scale, weights, start, end = (tensor.cuda() for tensor in case.tensors)
    start, end = (torch.stack([bound, bound * 0], 1)[:, 0] for bound in (start, end))
    ours = indexer.select_ragged(q, k, k_scale, weights, start, end, K, impl="triton")
    right = indexer.select_ragged(
        q, k, k_scale, weights, start.contiguous(), end.contiguous(), K, impl="triton"
    )
    assert torch.equal(ours, right)


@pytest.mark.parametrize("workspace", [1 << 20, 32 << 20, 256 << 20])
def test_temporaries_stay_within_the_workspace(workspace: int, form: str | None) -> None:
    paged_case = paged([150_000, 90_000] + [20_000] * 6)
    ragged_case = inputs.ragged([(0, 60_000)] * 64, 60_000, heads=HEADS, dim=DIM)
    ragged_tensors = [tensor.cuda() for tensor in ragged_case.tensors]
    for select, tensors, rows in (
        (indexer.select_paged, paged_case, 8),
        (indexer.select_ragged, ragged_tensors, 64),
    ):
        out = torch.empty((rows, K), dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        select(*tensors, K, out=out, workspace=workspace, impl="triton")
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= workspace + (64 << 10), select.__name__  # the allocator rounds up


def test_two_threads_on_streams_of_their_own(form: str | None) -> None:
    cases = [paged([9000 + 1000 * i] * 3, seed=i) for i in range(2)]
    right = [expected(tensors, 10_000) for tensors in cases]
    torch.cuda.synchronize()

    def repeat(which: int) -> int:
        wrong = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                ours = indexer.select_paged(*cases[which], K, impl="triton")
                wrong += not torch.equal(ours, right[which])
        return wrong

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(repeat, range(2))) == [0, 0]


def test_twenty_runs_are_equal_to_the_bit(form: str | None) -> None:
    tensors = paged(LENGTHS)
    runs = [indexer.select_paged(*tensors, K, impl="triton") for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_a_row_is_selected_alike_in_any_batch(form: str | None) -> None:
    q, cache, weights, lengths, table = paged([20_000] * 9)
    together = indexer.select_paged(q, cache, weights, lengths, table, K, impl="triton")
    for row in (0, 4, 8):
        one = slice(row, row + 1)
        alone = indexer.select_paged(
            q[one], cache, weights[one], lengths[one], table[one], K, impl="triton"
        )
        assert torch.equal(alone[0], together[row])


def test_the_recorded_selection_of_vllm(recording: Recording, form: str | None) -> None:
    decode = recording.decode
    ours = indexer.select_paged(
        decode.q.cuda(), decode.k_cache.cuda(), decode.weights.cuda(), decode.seq_lens.cuda(),
        decode.block_table.cuda(), TOP_K, impl="triton",
    )  # fmt: skip
    theirs = recording.attention.topk_indices
    assert [set(row) for row in ours.tolist()] == [set(row) for row in theirs.tolist()]


@pytest.mark.parametrize("workspace", [None, 2 << 20, 100_000])
def test_a_replayed_graph_follows_lengths_and_the_enabled_word(
    workspace: int | None, form: str | None
) -> None:
    q, cache, weights, lengths, table = paged([12_000] * 4)
    enabled = torch.ones(1, dtype=torch.int32, device="cuda")
    out = torch.empty((4, K), dtype=torch.int32, device="cuda")

    def select() -> None:
        indexer.select_paged(
            q, cache, weights, lengths, table, K, out=out, workspace=workspace, enabled=enabled,
            impl="triton",
        )  # fmt: skip

    select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select()
    for step, now in enumerate(([12_000, 1, 0, 500], [-1, 9000, 8192, 8193], [64, 63, 65, 11_999])):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        q.copy_(torch.roll(q, 1 + step, 0))
        out.fill_(77)
        enabled.fill_(0)
        graph.replay()
        assert (out == 77).all()
        enabled.fill_(1)
        graph.replay()
        assert torch.equal(out, expected([q, cache, weights, lengths, table], 12_000))


def test_a_million_tokens_and_offsets_past_32_bits() -> None:
    """The cache is 2.9 GB, so that most pages lie past 2^31 bytes."""
    length, pages, batch = 1 << 20, 340_000, 3
    source = torch.Generator("cuda").manual_seed(3)
    cache = torch.randint(0, 256, (pages, PAGE, DIM + 4), generator=source, device="cuda",
                          dtype=torch.uint8)  # fmt: skip
    flat = cache.view(pages, -1)
    values = flat[:, : PAGE * DIM]
    values.copy_(torch.where((values & 0x7F) == 0x7F, 0x7E, values))
    scales = torch.exp2(torch.randint(-4, 4, (pages, PAGE), generator=source, device="cuda"))
    flat[:, PAGE * DIM :] = scales.to(torch.float32).view(torch.uint8)
    table = pages - 1 - torch.randperm(length // PAGE * batch, generator=source, device="cuda")
    table = table.view(batch, -1).to(torch.int32)
    q = inputs.codes(torch.Generator().manual_seed(1), batch, 1, HEADS, DIM).cuda()
    weights = torch.randn((batch, HEADS), generator=source, device="cuda")
    lengths = torch.tensor([length, 4096, length - 5], dtype=torch.int32, device="cuda")
    ours = indexer.select_paged(q, cache, weights, lengths, table, 2048, impl="triton")
    scores = mqa_logits.paged(q, cache, weights, lengths, table, length, impl="triton")
    for row, seen in enumerate(lengths.tolist()):
        exact = scores_in_float64(q[row, 0], cache, weights[row], table[row], seen)
        assert (scores[row, :seen] - exact).norm() <= 5e-4 * exact.norm()
        right = topk.select(scores[row : row + 1].cpu(), 2048, impl="reference")
        assert torch.equal(ours[row].cpu(), right[0])


def scores_in_float64(
    q: Tensor, cache: Tensor, weights: Tensor, table: Tensor, seen: int
) -> Tensor:
    """[seen] of one row, by torch alone; pages are found with 64-bit indices."""
    flat = cache.view(len(cache), -1)
    scores = torch.empty(seen, dtype=torch.float64, device=cache.device)
    for begin in range(0, seen, 1 << 17):
        end = min(begin + (1 << 17), seen)
        pages = flat[table[begin // PAGE : -(-end // PAGE)].long()]
        keys = pages[:, : PAGE * DIM].contiguous().view(torch.float8_e4m3fn).to(torch.float64)
        scales = pages[:, PAGE * DIM :].contiguous().view(torch.float32).to(torch.float64)
        dots = q.view(torch.float8_e4m3fn).to(torch.float64) @ keys.view(-1, DIM).T
        summed = (dots.clamp_min(0) * weights.to(torch.float64)[:, None]).sum(0)
        scores[begin:end] = (summed * scales.flatten())[: end - begin]
    return scores
