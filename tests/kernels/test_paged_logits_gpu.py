"""Paged MQA logits in Triton on a GPU: float64, poison, repeats, configurations, graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits
from indexer_service.kernels.architecture import architecture
from indexer_service.kernels.compilation import count_compilations
from indexer_service.kernels.mqa_logits import paged_plan, reference
from indexer_service.kernels.mqa_logits.packed import PackedScores, padded, span, windows
from indexer_service.kernels.mqa_logits.paged_launch import paged, paged_packed
from tests.data.recording import Recording
from tests.kernels.inputs import Paged

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TOLERANCE = 5e-4
POISON = 77.0
LENGTHS = [5000, 0, 777, 64, 1, 12289, 128, -5]
CONTEXT = 12300


def codes(source: torch.Generator, *shape: int) -> Tensor:
    drawn = torch.randint(0, 256, shape, generator=source, device=DEVICE, dtype=torch.uint8)
    return torch.where((drawn & 0x7F) == 0x7F, drawn - 1, drawn)


def pages_of_keys(source: torch.Generator, pages: int, page: int) -> Tensor:
    cache = codes(source, pages, page * 132)
    scales = torch.rand((pages, page), generator=source, device=DEVICE) * 1e-3 + 1e-4
    cache[:, page * 128 :] = scales.view(torch.uint8)
    return cache.view(pages, page, 132)


def case(
    lengths: list[int], next_n: int = 1, heads: int = 64, page: int = 64, context: int = CONTEXT
) -> Paged:
    source = torch.Generator(DEVICE).manual_seed(len(lengths) + heads)
    batch, columns = len(lengths), -(-context // page)
    order = torch.randperm(batch * columns, generator=source, device=DEVICE)
    return Paged(
        q=codes(source, batch, next_n, heads, 128),
        k_cache=pages_of_keys(source, batch * columns, page),
        weights=torch.randn((batch * next_n, heads), generator=source, device=DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_table=order.view(batch, columns).to(torch.int32),
    )


def scored(given: Paged, context: int = CONTEXT, **options: Any) -> Tensor:
    """Our scores, written over poison, with poison around them that nothing may touch."""
    larger = torch.full((len(given.weights), context + 9), POISON, device=DEVICE)
    ours = larger[:, 3 : 3 + context]
    paged(*given.tensors, ours, **options)
    assert (larger[:, :3] == POISON).all()
    assert (larger[:, 3 + context :] == POISON).all()
    return ours


def exact(given: Paged, context: int = CONTEXT) -> Tensor:
    """float64, rounded once."""
    expected = torch.empty((len(given.weights), context), device=DEVICE)
    reference.paged(*given.tensors, expected)
    return expected


def same(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours.isneginf(), expected.isneginf())
    assert torch.equal(ours.isnan(), expected.isnan())
    seen = expected.isfinite()
    difference = (ours.double() - expected.double())[seen].norm()
    assert float(difference / expected.double()[seen].norm()) <= TOLERANCE


def bits(scores: Tensor) -> Tensor:
    """Comparable by torch.equal where NaN may be."""
    return torch.nan_to_num(scores, nan=12345.0).view(torch.int32)


def request_alone(given: Paged, request: int) -> Paged:
    next_n = given.q.shape[1]
    one, rows = slice(request, request + 1), slice(request * next_n, (request + 1) * next_n)
    return Paged(
        given.q[one], given.k_cache, given.weights[rows], given.seq_lens[one],
        given.block_table[one],
    )  # fmt: skip


def memory(rows: int, scores: int) -> PackedScores:
    def words(dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), -7, dtype=dtype, device=DEVICE)

    room = torch.full((scores,), POISON, device=DEVICE)
    return PackedScores(room, words(torch.int64), words(torch.int32), words(torch.int32))


def unpacked(given: Paged, packed: PackedScores, out: Tensor) -> None:
    """The rows that this window holds, into dense ones; what other rows hold stays."""
    places = zip(packed.row_at.tolist(), packed.row_end.tolist(), strict=True)
    for row, (at, end) in enumerate(places):
        if at >= 0:
            out[row] = -torch.inf
            out[row, :end] = packed.scores[at : at + end]


@pytest.mark.parametrize(
    ("next_n", "heads", "page"),
    [(1, 64, 64), (2, 32, 32), (4, 64, 64), (8, 16, 128), (3, 20, 16), (1, 128, 64)],
)
def test_scores_are_those_of_float64(form: str | None, next_n: int, heads: int, page: int) -> None:
    given = case(LENGTHS, next_n, heads, page)
    same(scored(given), exact(given))


def test_a_page_of_any_code_scores_as_in_float64_and_nan_spoils_its_own(form: str | None) -> None:
    given = case(LENGTHS, next_n=2)
    flat = given.k_cache.view(len(given.k_cache), -1)
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    for half in range(2):
        page = int(given.block_table[0, half + 3])
        some = every[half * 128 : half * 128 + 128]
        flat[page, 31 : 128 * 64 : 128], flat[page, 32 : 128 * 64 : 128] = some[::2], some[1::2]
    scale = torch.tensor([torch.nan]).view(torch.uint8).to(DEVICE)
    flat[int(given.block_table[2, 1]), 8192 + 4 : 8192 + 8] = scale
    given.q[3, 1, 5, 9] = 0xFF
    given.weights[9, 2] = torch.nan
    given.block_table[0, 9], given.block_table[0, 10] = -1, len(given.k_cache)
    given.block_table[5, 100], given.block_table[5, 3] = 2**31 - 1, -(2**31)
    same(scored(given), exact(given))


def test_the_recorded_step_of_vllm(form: str | None, recording: Recording) -> None:
    step = recording.decode
    tensors = (step.q, step.k_cache, step.weights, step.seq_lens, step.block_table)
    ours = mqa_logits.paged(*(t.to(DEVICE) for t in tensors), step.logits.shape[1], impl="triton")
    same(ours.cpu(), step.logits)


def test_twenty_runs_give_the_same_bits() -> None:
    given = case(LENGTHS, next_n=2)
    first = scored(given)
    for _ in range(19):
        assert torch.equal(scored(given), first)


@pytest.mark.parametrize(("next_n", "heads"), [(1, 64), (2, 64), (1, 32), (4, 16), (1, 128)])
def test_bits_do_not_depend_on_the_configuration(form: str | None, next_n: int, heads: int) -> None:
    given = case(LENGTHS, next_n, heads)
    arch = architecture(DEVICE)
    width = paged_plan.columns(heads, next_n)
    first = scored(given)
    seen = set()
    for tensor_maps in (True, False):
        for chosen in paged_plan.configurations(arch, width.heads, next_n, tensor_maps=tensor_maps):
            seen.add(chosen.kernel)
            assert torch.equal(scored(given, configuration=chosen), first), chosen
    assert "portable" in seen


def test_bits_depend_neither_on_the_batch_nor_on_the_other_rows_of_a_request(
    form: str | None,
) -> None:
    given = case(LENGTHS, next_n=4)
    together = scored(given)
    for request in range(len(LENGTHS)):
        alone = scored(request_alone(given, request))
        assert torch.equal(alone, together[4 * request : 4 * request + 4])
    for j in range(4):
        row = Paged(
            given.q[:, j : j + 1].contiguous(), given.k_cache, given.weights[j::4],
            given.seq_lens - 3 + j, given.block_table,
        )  # fmt: skip
        assert torch.equal(scored(row), together[j::4])


def test_strided_arguments_mean_what_contiguous_ones_do() -> None:
    given = case(LENGTHS, next_n=2)
    expected = scored(given)
    lengths = torch.tensor([[length - 1, length] for length in LENGTHS], dtype=torch.int32)
    wide = torch.full((len(LENGTHS), 5), 9999, dtype=torch.int32)
    wide[:, 1:4:2] = lengths
    given.seq_lens = wide.to(DEVICE)[:, 1:4:2]
    given.block_table = given.block_table.T.contiguous().T
    given.weights = given.weights.T.contiguous().T
    given.q = given.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(scored(given), expected)


@pytest.mark.parametrize("stride", [1_077_120, 3_000_004])
def test_caches_of_more_than_2_to_the_31_bytes(stride: int) -> None:
    """Pages of one buffer of all layers; also where the copy engine cannot read them."""
    pages = 2**31 // stride + 40
    given = case([40 * 64], context=40 * 64)
    buffer = torch.empty(pages * stride, dtype=torch.uint8, device=DEVICE)
    apart = buffer.as_strided((pages, 64, 132), (stride, 132, 1))
    apart[-40:] = given.k_cache
    expected = scored(given, 40 * 64)
    moved = Paged(
        given.q, apart, given.weights, given.seq_lens, given.block_table + (pages - 40)
    )  # fmt: skip
    assert torch.equal(scored(moved, 40 * 64), expected)


def test_a_million_keys_a_row() -> None:
    context = 1 << 20
    given = case([context, 100], context=64)
    source = torch.Generator(DEVICE).manual_seed(5)
    given.block_table = torch.randint(
        0, len(given.k_cache), (2, context // 64), generator=source, device=DEVICE,
        dtype=torch.int32,
    )  # fmt: skip
    same(scored(given, context), exact(given, context))


@pytest.mark.parametrize("next_n", [1, 2])
def test_packed_rows_hold_what_dense_ones_do(form: str | None, next_n: int) -> None:
    given = case(LENGTHS * 20, next_n)
    rows = len(given.weights)
    expected = scored(given)
    for room in (2, 5, 70):
        scores = room * next_n * padded(CONTEXT) + 100
        ours = torch.full_like(expected, POISON)
        for window in range(windows(rows // next_n, next_n, CONTEXT, scores)):
            packed = memory(rows, scores)
            paged_packed(*given.tensors, packed, limit=CONTEXT, window=window)
            assert (packed.arrived == 0).all()
            unpacked(given, packed, ours)
        assert torch.equal(ours, expected)


def test_a_window_that_is_disabled_or_empty_touches_no_score() -> None:
    given = case(LENGTHS)
    packed = memory(len(LENGTHS), 4 * padded(CONTEXT))
    off = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    paged_packed(*given.tensors, packed, limit=CONTEXT, enabled=off)
    assert (packed.row_at == -7).all()
    assert (packed.scores == POISON).all()
    far = 10**6 // span(len(packed.scores), 1, CONTEXT)
    paged_packed(*given.tensors, packed, limit=CONTEXT, window=far, enabled=off + 1)
    assert (packed.row_at == -1).all()
    assert (packed.scores == POISON).all()


def test_a_captured_graph_follows_lengths_and_tables() -> None:
    given = case(LENGTHS)
    out = torch.empty((len(LENGTHS), CONTEXT), device=DEVICE)
    packed = memory(len(LENGTHS), 9 * padded(CONTEXT))

    def run() -> None:
        paged(*given.tensors, out)
        paged_packed(*given.tensors, packed, limit=CONTEXT)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for shift in (0, 1, 3):
        given.seq_lens.copy_(torch.tensor(LENGTHS, dtype=torch.int32).roll(shift))
        given.block_table.copy_(given.block_table.roll(shift, 1))
        graph.replay()
        expected = scored(given)
        assert torch.equal(out, expected)
        ours = torch.full_like(out, POISON)
        unpacked(given, packed, ours)
        assert torch.equal(ours, expected)


def test_nothing_compiles_after_the_first_call(form: str | None) -> None:
    def calls(lengths: list[int], context: int, strided: bool) -> list[Callable[[], None]]:
        given = case(lengths, context=context)
        room = 3 * max(1, len(lengths)) * padded(context)
        packed = memory(len(lengths), room)
        if strided:
            given.block_table = given.block_table.T.contiguous().T
            given.weights = given.weights.T.contiguous().T
            given.seq_lens = given.seq_lens.repeat_interleave(3)[1::3]
        on = torch.ones(3, dtype=torch.int32, device=DEVICE)[2:]
        return [
            lambda: paged_packed(*given.tensors, packed, limit=context),
            lambda: paged_packed(*given.tensors, packed, limit=context, enabled=on),
            lambda: void(scored(given, context)),
        ]

    def void(_: Tensor) -> None: ...

    for call in calls([50, 70], 128, strided=False):
        call()
    with count_compilations() as compiled:
        for lengths, context, strided in (
            ([1], 1, True), ([17], 100, False), ([16] * 16, 1600, True), ([5] * 300, 77, False),
        ):  # fmt: skip
            for call in calls(lengths, context, strided):
                call()
    assert not compiled


def test_no_requests_no_context_and_no_pages() -> None:
    given = case([100, 20], context=128)
    none = request_alone(given, 0)
    none.q, none.weights = none.q[:0], none.weights[:0]
    none.seq_lens, none.block_table = none.seq_lens[:0], none.block_table[:0]
    assert scored(none, 10).shape == (0, 10)
    assert scored(given, 0).shape == (2, 0)
    given.k_cache = given.k_cache[:0]
    ours = scored(given, 128)
    assert ours[0, :100].isnan().all()
    assert torch.isneginf(ours[0, 100:]).all()
    given.block_table = given.block_table[:, :0]
    assert torch.isneginf(scored(given, 50)).all()
