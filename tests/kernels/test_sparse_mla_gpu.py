"""sparse_mla's Triton kernels on a GPU: float64, poison, repeats, splits, graphs, compilations."""

import math

import pytest
import torch
from torch import Tensor

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla.layout import decode_tokens
from indexer_service.kernels.compilation import count_compilations
from tests.data.recording import Recording

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
PAGES, PAGE = 96, 64
TOKENS = PAGES * PAGE
TOLERANCE = 4e-3


def lse_tolerance(kind: str, form: str | None) -> float:
    """SM90 multiplies e4m3 keys as they are, and its tensor units keep some 13 bits of the sums of
    such products; elsewhere products are of bf16 values, and summed in fp32."""
    return 1e-4 if kind == "fp8" and form is None else 1e-5


def random(seed: int, *shape: int) -> Tensor:
    source = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=source, device=DEVICE)


def cache(kind: str, width: int = 576) -> Tensor:
    if kind != "fp8":
        return random(1, PAGES, PAGE, width).to(getattr(torch, kind))
    source = torch.Generator(DEVICE).manual_seed(1)
    codes = torch.randint(0, 256, (TOKENS, 512), generator=source, device=DEVICE)
    codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes).to(torch.uint8)
    scales = random(2, TOKENS, 4).abs() * 0.01 + 1e-4
    rope = random(3, TOKENS, 64).to(torch.bfloat16)
    parts = [codes, scales.view(torch.uint8), rope.view(torch.uint8)]
    return torch.cat(parts, 1).view(PAGES, PAGE, 656)


def chosen_slots(tokens: int, k: int) -> Tensor:
    """Distinct slots a row, holes in most rows; a row of three, and a last one without any."""
    source = torch.Generator(DEVICE).manual_seed(4)
    rows = [torch.randperm(TOKENS, generator=source, device=DEVICE)[:k] for _ in range(tokens)]
    slots = torch.stack(rows).to(torch.int32)
    slots[1:, 5::11] = -1
    if tokens > 2:
        slots[1, : max(0, k - 3)] = -1
        slots[2, 0], slots[2, 1] = TOKENS, 2**31 - 1
        slots[-1] = -1
    return slots


def exact(q: Tensor, kv: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """float64 out and lse."""
    flat, outs, sums = kv.reshape(TOKENS, kv.shape[2]), [], []
    for query, row in zip(q.double(), slots.long(), strict=True):
        valid = row[(row >= 0) & (row < TOKENS)]
        if not len(valid):
            outs.append(query.new_zeros((len(query), 512)))
            sums.append(query.new_full((len(query),), -math.inf))
            continue
        values = decode_tokens(flat[valid]).double()
        scores = query @ values.T * scale
        outs.append(scores.softmax(-1) @ values[:, :512])
        sums.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    assert torch.equal(ours.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    difference = (ours.double() - expected)[finite].norm()
    return float(difference / expected[finite].norm())


@pytest.mark.parametrize(
    ("kind", "heads", "tokens", "width", "k"),
    [
        ("bfloat16", 8, 1, 576, 2048),
        ("bfloat16", 16, 5, 576, 2048),
        ("bfloat16", 16, 300, 576, 128),
        ("bfloat16", 20, 9, 576, 333),
        ("bfloat16", 64, 1, 576, 2048),
        ("bfloat16", 64, 9, 576, 2048),
        ("bfloat16", 128, 33, 576, 2048),
        ("bfloat16", 128, 5, 512, 130),
        ("bfloat16", 16, 7, 512, 40),
        ("float16", 16, 4, 576, 64),
        ("float16", 64, 4, 576, 512),
        ("fp8", 16, 5, 576, 2048),
        ("fp8", 20, 9, 576, 333),
        ("fp8", 40, 5, 576, 300),
        ("fp8", 128, 33, 576, 2048),
        ("fp8", 16, 300, 576, 64),
    ],
)
def test_answers_equal_float64_whatever_else_the_cache_holds(
    form: str | None, kind: str, heads: int, tokens: int, width: int, k: int
) -> None:
    kv, slots, scale = cache(kind, width), chosen_slots(tokens, k), 576**-0.5
    q = random(5, tokens, heads, width).to(torch.float16 if kind == "float16" else torch.bfloat16)
    expected, expected_lse = exact(q, kv, slots, scale)
    used = slots[(slots >= 0) & (slots < TOKENS)].long().unique()
    unused = torch.ones(TOKENS, dtype=torch.bool, device=DEVICE)
    unused[used] = False
    kv.view(TOKENS, -1)[unused] = 0xFF if kind == "fp8" else math.nan

    out = torch.full((tokens, heads + 1, 512), math.nan, dtype=q.dtype, device=DEVICE)[:, 1:]
    ours, lse = sparse_mla.attend(q, kv, slots, scale, return_lse=True, out=out)
    assert relative_error(ours, expected) <= TOLERANCE
    assert relative_error(lse, expected_lse) <= lse_tolerance(kind, form)
    if tokens > 2:
        assert (ours[-1] == 0).all()

    room = torch.zeros((PAGES, 2, PAGE, kv.shape[2] + 16), dtype=kv.dtype, device=DEVICE)
    room[:, 1, :, : kv.shape[2]] = kv
    apart = sparse_mla.attend(q, room[:, 1, :, : kv.shape[2]], slots, scale)
    assert torch.equal(apart, ours)

    pair = (q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), q[..., 512:])
    if width == 576:
        assert torch.equal(sparse_mla.attend(pair, kv, slots, scale), ours)


@pytest.mark.parametrize(
    ("kind", "heads"), [("bfloat16", 16), ("bfloat16", 64), ("fp8", 16), ("fp8", 64)]
)
def test_every_number_of_splits_gives_the_answer(form: str | None, kind: str, heads: int) -> None:
    kv, slots = cache(kind), chosen_slots(3, 2048)
    q = random(5, 3, heads, 576).to(torch.bfloat16)
    expected, expected_lse = exact(q, kv, slots, 0.05)
    for splits in (1, 2, 3, 4, 5, 8, 16, 32, 64, 1000):
        ours, lse = sparse_mla.attend(q, kv, slots, 0.05, return_lse=True, num_kv_splits=splits)
        assert relative_error(ours, expected) <= TOLERANCE
        assert relative_error(lse, expected_lse) <= lse_tolerance(kind, form)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_twenty_runs_give_the_same_bits(form: str | None, kind: str, heads: int) -> None:
    kv, slots = cache(kind), chosen_slots(40, 2048)
    q = random(5, 40, heads, 576).to(torch.bfloat16)
    first = sparse_mla.attend(q, kv, slots, 0.05)
    for _ in range(20):
        assert torch.equal(sparse_mla.attend(q, kv, slots, 0.05), first)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_batch_invariant_rows_do_not_depend_on_the_batch(
    form: str | None, kind: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    kv, slots = cache(kind), chosen_slots(300, 2048)
    q = random(5, 300, heads, 576).to(torch.bfloat16)
    whole = sparse_mla.attend(q, kv, slots, 0.05)
    # From a program a split to programs that have, and merge, all splits of a row.
    for some in (slice(7, 8), slice(7, 9), slice(4, 30), slice(4, 70), slice(0, 140)):
        assert torch.equal(sparse_mla.attend(q[some], kv, slots[some], 0.05), whole[some])
    monkeypatch.setattr("attention_worker.kernels.sparse_mla.plan.WORKSPACE_BYTES", 1 << 20)
    assert torch.equal(sparse_mla.attend(q, kv, slots, 0.05), whole)


def test_every_e4m3_code_is_decoded_exactly(form: str | None) -> None:
    """One slot a row: what comes out is its latent part, of all codes but NaN in all groups."""
    codes = torch.arange(512, device=DEVICE).roll(7) % 256
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)
    scales = torch.tensor([1.0, 2.0**-9, 4.0, 0.5], device=DEVICE)
    rope = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    token = torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)])
    kv = token.expand(PAGES, PAGE, 656).contiguous()
    q = random(5, 2, 16, 576).to(torch.bfloat16)
    slots = torch.tensor([[-1, 5], [77, -1]], dtype=torch.int32, device=DEVICE)
    ours, lse = sparse_mla.attend(q, kv, slots, 0.05, return_lse=True)
    expected = decode_tokens(token.view(1, 656))
    assert torch.equal(ours.float(), expected[:, :512].expand(2, 16, 512))
    products = q.double() * expected[0].double() * 0.05
    bits = 13 if form is None else 24  # what SM90's tensor units keep of e4m3 sums, and fp32
    allowed = products.abs().sum(-1) * 2.0**-bits
    assert ((lse.double() - products.sum(-1)).abs() <= allowed).all()


def test_a_row_that_attends_to_a_nan_code_is_nan(form: str | None) -> None:
    kv, slots = cache("fp8"), chosen_slots(4, 128)
    kv.view(TOKENS, 656)[slots[0, 7], 200] = 0xFF
    slots[1:] = torch.where(slots[1:] == slots[0, 7], -1, slots[1:])
    q = random(5, 4, 16, 576).to(torch.bfloat16)
    for splits in (1, 2):
        ours = sparse_mla.attend(q, kv, slots, 0.05, num_kv_splits=splits)
        assert ours[0].isnan().all()
        assert ours[1:].isfinite().all()


def test_large_scores_do_not_overflow(form: str | None) -> None:
    q = random(5, 3, 16, 576).to(torch.bfloat16) * 300
    assert sparse_mla.attend(q, cache("bfloat16"), chosen_slots(3, 64), 1.0).isfinite().all()


@pytest.mark.parametrize(("kind", "heads"), [("bfloat16", 16), ("bfloat16", 128), ("fp8", 16)])
def test_after_warm_up_nothing_compiles_and_graphs_replay(
    form: str | None, kind: str, heads: int
) -> None:
    from attention_worker.kernels.sparse_mla.warm_up import warm_up

    kv, told = cache(kind), []
    ran = warm_up(
        heads, 2048, kv.dtype, DEVICE, progress=lambda done, total, _: told.append((done, total))
    )
    assert told == [(done, ran) for done in range(ran)]
    table = torch.arange(PAGES, dtype=torch.int32, device=DEVICE).view(1, -1)
    with count_compilations() as compiled:
        for tokens in (1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 133, 263, 301):
            q = random(tokens, tokens, heads, 576).to(torch.bfloat16)
            requests = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
            indices = chosen_slots(tokens, 2048)
            wide = torch.zeros((tokens, 2049), dtype=torch.int32, device=DEVICE)
            wide[:, 1:] = sparse_mla.to_slots(indices, requests, table, PAGE, pages=PAGES)
            slots = wide[:, 1:]
            eager = sparse_mla.attend(q, kv, slots, 0.05)
            graph, out = torch.cuda.CUDAGraph(), torch.empty_like(eager)
            with torch.cuda.graph(graph):
                sparse_mla.attend(q, kv, slots, 0.05, out=out)
            for replay in range(2):
                out.zero_()
                slots.copy_(slots.roll(replay, 0))
                graph.replay()
                assert torch.equal(out, sparse_mla.attend(q, kv, slots, 0.05))
    assert not compiled


def test_offsets_beyond_32_bits() -> None:
    pages = 2**31 // (PAGE * 576) + 3
    kv = torch.empty((pages, PAGE, 576), dtype=torch.bfloat16, device=DEVICE)
    kv[-1] = random(1, PAGE, 576).to(torch.bfloat16)
    slots = torch.arange((pages - 1) * PAGE, pages * PAGE, dtype=torch.int32, device=DEVICE)
    q = random(5, 2, 16, 576).to(torch.bfloat16)
    local = torch.arange(PAGE, dtype=torch.int32, device=DEVICE)
    for heads in (1, 4):
        query = q.repeat(1, heads, 1)
        ours = sparse_mla.attend(query, kv, slots.expand(2, -1), 0.05)
        expected = sparse_mla.attend(query, kv[-1:].clone(), local.expand(2, -1), 0.05)
        assert torch.equal(ours, expected)


def test_recorded_attention_matches_flashmla(recording: Recording, form: str | None) -> None:
    attention = recording.attention
    slots = sparse_mla.to_slots(
        attention.topk_indices.to(DEVICE),
        torch.arange(2, dtype=torch.int32, device=DEVICE),
        attention.block_table.to(DEVICE), PAGE,
    )  # fmt: skip
    ours = sparse_mla.attend(
        attention.q.to(DEVICE), attention.kv_cache.to(DEVICE), slots, attention.scale
    )
    assert relative_error(ours, attention.out.to(DEVICE).double()) <= TOLERANCE


@pytest.mark.parametrize("pages", [None, 6])
def test_to_slots_equals_the_reference(pages: int | None) -> None:
    source = torch.Generator().manual_seed(0)
    indices = torch.randint(-3, 40, (50, 2500), generator=source, dtype=torch.int32)
    requests = torch.randint(-1, 5, (50,), generator=source, dtype=torch.int32)
    table = torch.randint(-2, 9, (4, 8), generator=source, dtype=torch.int32)
    counts = [torch.full((1,), 7, dtype=torch.int32) for _ in range(2)]
    expected = sparse_mla.to_slots(
        indices, requests, table[:, ::2], 8, pages=pages, invalid_count=counts[0]
    )
    counts[1] = counts[1].to(DEVICE)
    ours = sparse_mla.to_slots(
        indices.to(DEVICE).T.contiguous().T, requests.to(DEVICE), table.to(DEVICE)[:, ::2], 8,
        pages=pages, invalid_count=counts[1],
    )  # fmt: skip
    assert torch.equal(ours.cpu(), expected)
    assert torch.equal(counts[1].cpu(), counts[0])


def test_no_tokens_and_no_slots() -> None:
    q, kv = random(5, 2, 16, 576).to(torch.bfloat16), cache("bfloat16")
    none = torch.zeros((2, 0), dtype=torch.int32, device=DEVICE)
    out, lse = sparse_mla.attend(q, kv, none, 1.0, return_lse=True)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    assert sparse_mla.attend(q[:0], kv, none[:0], 1.0).shape == (0, 16, 512)
