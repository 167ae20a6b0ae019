"""Ragged MQA logits in Triton on a GPU: float64, poison, repeats, tiles, batches, graphs."""

import math

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits
from indexer_service.kernels.architecture import architecture, native_fp8
from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.compilation import count_compilations
from indexer_service.kernels.mqa_logits import ragged_plan
from indexer_service.kernels.mqa_logits.ragged_launch import decoded_bytes, ragged
from tests.data.recording import Recording
from tests.kernels.inputs import Ragged

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TOLERANCE = 5e-4
POISON = 77.0


def case(rows: int, keys: int, heads: int = 64, dim: int = 128, seed: int = 0) -> Ragged:
    """Rows with random bounds, some of them outside [0, keys], empty or reversed."""
    source = torch.Generator(DEVICE).manual_seed(seed)

    def codes(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=source, device=DEVICE) * 90
        return values.clamp_(-448, 448).to(E4M3).view(torch.uint8)

    def bounds(low: int, high: int) -> Tensor:
        drawn = torch.randint(low, high, (rows,), generator=source, device=DEVICE)
        return drawn.to(torch.int32)

    return Ragged(
        q=codes(rows, heads, dim),
        k=codes(keys, dim),
        k_scale=torch.rand(keys, generator=source, device=DEVICE) * 1e-3 + 1e-4,
        weights=torch.randn((rows, heads), generator=source, device=DEVICE),
        row_start=bounds(-50, keys // 2),
        row_end=bounds(-50, keys + 200),
    )


def some_rows(whole: Ragged, rows: slice) -> Ragged:
    bounds = whole.row_start[rows], whole.row_end[rows]
    return Ragged(whole.q[rows], whole.k, whole.k_scale, whole.weights[rows], *bounds)


def exact(given: Ragged) -> Tensor:
    """float64 scores, -inf outside the bounds."""
    q, k = given.q.view(E4M3).double(), given.k.view(E4M3).double()
    products = (q.flatten(0, 1) @ k.T).unflatten(0, (len(q), -1)).relu_()
    scores = (products * given.weights.double().unsqueeze(2)).sum(1) * given.k_scale.double()
    key = torch.arange(len(k), device=DEVICE)
    hidden = (key < given.row_start.unsqueeze(1)) | (key >= given.row_end.unsqueeze(1))
    expected: Tensor = scores.masked_fill_(hidden, -math.inf)
    return expected


def relative_error(ours: Tensor, expected: Tensor) -> float:
    assert torch.equal(torch.isneginf(ours), torch.isneginf(expected))
    assert torch.equal(ours.isnan(), expected.isnan())
    seen = expected.isfinite()
    difference = (ours.double() - expected)[seen].norm()
    return float(difference / expected[seen].norm())


def score(given: Ragged) -> Tensor:
    return mqa_logits.ragged(*given.tensors, impl="triton")


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "dim"),
    [
        (1, 100, 64, 128),
        (1, 5000, 64, 128),
        (3, 257, 64, 128),
        (700, 3001, 64, 128),
        (100, 9001, 64, 128),
        (300, 1024, 32, 128),
        (129, 1000, 16, 128),
        (130, 1000, 128, 128),
        (60, 1000, 12, 128),
        (60, 1000, 64, 64),
        (60, 1000, 40, 48),
        (20, 300, 200, 128),
        (20, 300, 8, 256),
    ],
)
def test_scores_equal_float64_and_nothing_else_is_written(
    form: str | None, rows: int, keys: int, heads: int, dim: int
) -> None:
    given = case(rows, keys, heads, dim)
    expected = exact(given)
    room = torch.full((rows, 2, keys + 3), POISON, device=DEVICE)
    out = room[:, 1, 1 : keys + 1]
    mqa_logits.ragged(*given.tensors, out=out, impl="triton")
    assert relative_error(out, expected) <= TOLERANCE
    assert (room[:, 0] == POISON).all()
    assert (room[:, 1, [0, -2, -1]] == POISON).all()

    seen = torch.full_like(expected, POISON, dtype=torch.float32)
    ragged(*given.tensors, seen, fill=False)
    assert torch.equal(seen, torch.where(torch.isneginf(expected), POISON, out))


def test_recorded_scores_match_deepgemm(recording: Recording, form: str | None) -> None:
    rows = recording.prefill
    tensors = (rows.q, rows.k, rows.k_scale, rows.weights, rows.row_start, rows.row_end)
    ours = mqa_logits.ragged(*(tensor.to(DEVICE) for tensor in tensors), impl="triton")
    assert relative_error(ours, rows.logits.to(DEVICE).double()) <= TOLERANCE


def test_every_code_scores_its_own_value_and_nan_spoils_its_key_or_row(form: str | None) -> None:
    given = case(256, 256, heads=32)
    given.row_start[:] = 0
    given.row_end[:] = 256
    given.k[:, 17] = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    given.q[:, 5, 9] = given.k[:, 17].flip(0)
    given.k_scale[3] = math.nan
    given.weights[200, 1] = math.nan
    ours = score(given)
    assert relative_error(ours, exact(given)) <= TOLERANCE
    assert ours.isnan().all(0).nonzero().flatten().tolist() == [3, 0x7F, 0xFF]


def test_twenty_runs_give_the_same_bits(form: str | None) -> None:
    given = case(500, 4000)
    first = score(given)
    for _ in range(20):
        assert torch.equal(score(given), first)


@pytest.mark.parametrize("heads", [16, 20, 32, 64, 128])
def test_every_configuration_gives_the_same_bits(form: str | None, heads: int) -> None:
    given = case(301, 3000, heads)
    expected = score(given)
    arch = architecture(DEVICE)
    others = ragged_plan.configurations(89, heads) if native_fp8(arch) else ()
    for configuration in (*ragged_plan.configurations(arch, heads), *others):
        ours = torch.full_like(expected, POISON)
        ragged(*given.tensors, ours, configuration=configuration)
        assert torch.equal(ours, expected), configuration


def test_a_score_depends_on_nothing_else_in_the_batch(form: str | None) -> None:
    given = case(400, 9000)
    whole = score(given)
    for rows in (slice(7, 8), slice(7, 9), slice(300, 301), slice(3, 150)):
        assert torch.equal(score(some_rows(given, rows)), whole[rows])
    for begin, end in ((1, 9000), (777, 3333), (8999, 9000)):
        given_keys = Ragged(
            given.q, given.k[begin:end], given.k_scale[begin:end], given.weights,
            given.row_start - begin, given.row_end - begin,
        )  # fmt: skip
        assert torch.equal(score(given_keys), whole[:, begin:end])


def test_decoding_in_turns_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_FORCE_ARCH", "80")
    given = case(300, 1000)
    expected = score(given)
    for workspace in (1, 4 * 128 * 333):
        ours = torch.full_like(expected, POISON)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ragged(*given.tensors, ours, workspace=workspace)
        taken = torch.cuda.max_memory_allocated() - before
        assert torch.equal(ours, expected)
        assert taken <= decoded_bytes(300, 64, 128, 1000, DEVICE, workspace) + 1024


def test_after_one_call_of_a_kind_nothing_compiles_and_graphs_replay(form: str | None) -> None:
    word = torch.ones(1, dtype=torch.int32, device=DEVICE)
    shapes = [(1, 1), (1, 4096), (2, 100), (16, 1001), (33, 5000), (300, 257), (40, 9000)]
    for rows, keys in shapes:
        ragged(*case(rows, keys).tensors, torch.empty((rows, keys), device=DEVICE))
        for enabled in (None, word):
            ragged(
                *case(rows, keys).tensors, torch.empty((rows, keys), device=DEVICE), fill=False,
                enabled=enabled,
            )  # fmt: skip
    with count_compilations() as compiled:
        for rows, keys in [*shapes, (7, 33), (64, 64), (130, 4097), (3, 20_000)]:
            given = case(rows, keys)
            given.weights = given.weights.repeat(1, 2)[:, 64:]
            room = torch.empty((rows, keys + 1), device=DEVICE)
            eager = score(given)
            graph, out = torch.cuda.CUDAGraph(), room[:, 1:]
            with torch.cuda.graph(graph):
                ragged(*given.tensors, out)
                ragged(*given.tensors, eager, fill=False, enabled=word)
            for seed in (1, 2):
                changed = case(rows, keys, seed=seed)
                for before, now in zip(given.tensors, changed.tensors, strict=True):
                    before.copy_(now)
                room.fill_(POISON)
                graph.replay()
                assert torch.equal(out, score(changed))
                assert (room[:, 0] == POISON).all()
    assert not compiled


def test_a_word_of_zero_leaves_everything_as_it_was(form: str | None) -> None:
    given, word = case(40, 1000), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.full((40, 1000), POISON, device=DEVICE)
    ragged(*given.tensors, out, fill=False, enabled=word)
    assert (out == POISON).all()
    ragged(*given.tensors, out, enabled=word)
    assert (out == POISON).all()


def test_a_row_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^q: .* \(fix: .+\)$"):
        score(case(2, 10, heads=300))


def test_scores_beyond_32_bits(form: str | None) -> None:
    rows, keys = 34_000, 65_536
    assert rows * keys > 2**31
    given = case(rows, keys, heads=16)
    given.row_end[-9:] = keys
    out = torch.full((rows, keys), math.nan, device=DEVICE)
    mqa_logits.ragged(*given.tensors, out=out, impl="triton")
    for some in (slice(0, 4), slice(32_765, 32_772), slice(rows - 9, rows)):
        assert relative_error(out[some], exact(some_rows(given, some))) <= TOLERANCE
    assert not out.isnan().any()
