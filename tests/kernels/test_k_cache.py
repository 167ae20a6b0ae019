"""k_cache: the bytes of insert, and that gather reads them back."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import k_cache
from tests.kernels import inputs, naive

PAGE, DIM = 16, 32


def empty_cache(pages: int = 4) -> Tensor:
    return torch.zeros((pages, PAGE, DIM + 4), dtype=torch.uint8)


def slots(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def token(cache: Tensor, slot: int) -> tuple[Tensor, float]:
    codes, scales = naive.planar_page(cache[slot // PAGE].numpy().reshape(-1), cache.shape[2] - 4)
    return torch.from_numpy(codes[slot % PAGE]), float(scales[slot % PAGE])


def keys(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn((count, DIM), generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_value_is_rounded_to_the_nearest_e4m3(dtype: torch.dtype) -> None:
    k, cache = keys(20, dtype), empty_cache()
    places = torch.randperm(64)[:20]
    k_cache.insert(k, places, cache)
    representable = torch.from_numpy(naive.e4m3(torch.arange(256, dtype=torch.uint8)))
    for row, slot in zip(k.double(), places.tolist(), strict=True):
        codes, scale = token(cache, slot)
        stored = torch.from_numpy(naive.e4m3(codes)) * scale
        gap = (representable * scale - row.unsqueeze(1)).abs().nan_to_num(math.inf).amin(1)
        torch.testing.assert_close((stored - row).abs(), gap, rtol=0, atol=0)


@pytest.mark.parametrize("exponent", [-30, -21, -20, 0, 5, 100])
@pytest.mark.parametrize("amax", [448, 450, 446, 256, 255], ids=lambda amax: f"amax{amax}")
def test_the_scale_is_the_exact_power_of_two_also_at_the_powers(exponent: int, amax: int) -> None:
    k = torch.zeros((1, DIM), dtype=torch.bfloat16)
    k[0, 5] = -amax * 2.0**exponent
    cache = empty_cache()
    k_cache.insert(k, slots(0), cache)
    scale = Fraction(token(cache, 0)[1])
    wanted = max(Fraction(abs(float(k[0, 5]))), Fraction(1e-4)) / 448
    assert scale / 2 < wanted <= scale
    assert scale.numerator & (scale.numerator - 1) == 0  # a power of two above one or ...
    assert scale.denominator & (scale.denominator - 1) == 0  # ... below


def test_infinities_saturate_nan_stays_nan_and_neither_spoils_the_rest() -> None:
    k, cache = keys(1), empty_cache()
    clean = empty_cache()
    special = [4, 9, 11]
    k[0, special] = 0.0
    k_cache.insert(k, slots(3), clean)
    k[0, special] = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.bfloat16)
    k_cache.insert(k, slots(3), cache)
    codes, scale = token(cache, 3)
    clean_codes, clean_scale = token(clean, 3)
    assert scale == clean_scale
    stored = naive.e4m3(codes)
    assert stored[4] == 448
    assert stored[9] == -448
    assert math.isnan(stored[11])
    others = [column for column in range(DIM) if column not in special]
    assert torch.equal(codes[others], clean_codes[others])


def test_a_nan_has_one_code_whatever_its_sign() -> None:
    k, cache = keys(1), empty_cache()
    bits = torch.tensor([0x7FC0, 0xFFC0 - 65536, 0x7F81, 0xFF81 - 65536], dtype=torch.int16)
    k[0, :4] = bits.view(torch.bfloat16)
    k_cache.insert(k, slots(3), cache)
    assert token(cache, 3)[0][:4].tolist() == [0x7F] * 4


def test_a_replica_gets_the_same_bytes() -> None:
    k, cache = keys(20), empty_cache()
    buffer = torch.full((4, 3, PAGE, DIM + 4), 0xEE, dtype=torch.uint8)
    buffer[:, 1] = 0
    k_cache.insert(k, torch.randperm(80)[:20], cache, replica=buffer[:, 1])
    assert cache.any()
    assert torch.equal(buffer[:, 1], cache)
    assert (buffer[:, [0, 2]] == 0xEE).all()


@pytest.mark.parametrize(
    "replica",
    [
        empty_cache(3),
        empty_cache()[:, :, :-1],
        empty_cache()[:, ::2],
        empty_cache().float(),
        empty_cache().to("meta"),
    ],
    ids=["pages", "width", "strides", "dtype", "device"],
)
def test_a_replica_that_is_not_like_the_cache_is_refused(replica: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^replica: .* \(fix: .+\)$"):
        k_cache.insert(keys(2), slots(0, 1), empty_cache(), replica=replica)


def test_slots_outside_the_cache_are_skipped() -> None:
    k, cache, expected = keys(5), empty_cache(), empty_cache()
    k_cache.insert(k, slots(-1, 7, 64, -9, 2**40), cache)
    k_cache.insert(k[1:2], slots(7), expected)
    assert torch.equal(cache, expected)


def test_a_padded_batch_has_more_keys_than_slots() -> None:
    k, cache, expected = keys(5), empty_cache(), empty_cache()
    k_cache.insert(k, slots(3, 4), cache)
    k_cache.insert(k[:2], slots(3, 4), expected)
    assert torch.equal(cache, expected)


def test_pages_within_a_larger_buffer_equal_a_compact_copy() -> None:
    k, compact = keys(20), empty_cache()
    buffer = torch.full((4, 3, PAGE, DIM + 4), 0xEE, dtype=torch.uint8)
    strided = buffer[:, 1]
    strided.zero_()
    places = torch.randperm(64)[:20]
    k_cache.insert(k, places, compact)
    k_cache.insert(k, places, strided)
    assert torch.equal(strided, compact)
    assert (buffer[:, [0, 2]] == 0xEE).all()
    table, lengths = torch.tensor([[3, 1], [0, 2]]).int(), torch.tensor([30, 17]).int()
    for ours, theirs in zip(
        k_cache.gather(strided, table, lengths), k_cache.gather(compact, table, lengths),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_gather_gives_each_requests_keys_one_after_the_other() -> None:
    lengths = [40, 0, -3, 1, 16]
    case = inputs.paged(lengths)
    values, scales = k_cache.gather(case.k_cache, case.block_table, case.seq_lens)
    expected = [
        naive.request_keys(case.k_cache, row.tolist(), max(length, 0))
        for row, length in zip(case.block_table, lengths, strict=True)
    ]
    assert torch.equal(values.view(torch.uint8), torch.cat([part[0] for part in expected]))
    assert torch.equal(scales, torch.cat([part[1] for part in expected]))


def test_gather_of_nothing() -> None:
    cache = empty_cache()
    empty = torch.zeros((0, 3), dtype=torch.int32)
    values, scales = k_cache.gather(cache, empty, empty[:, 0])
    assert values.shape == (0, DIM)
    assert scales.shape == (0,)


def test_gather_gives_nan_scales_for_pages_outside_the_cache() -> None:
    table = torch.tensor([[0, 4, -1]], dtype=torch.int32)
    _, scales = k_cache.gather(empty_cache(), table, torch.tensor([48], dtype=torch.int32))
    assert scales[:16].isfinite().all()
    assert scales[16:].isnan().all()


@pytest.mark.parametrize(
    ("name", "k", "where", "cache"),
    [
        ("k", keys(2).float(), slots(0, 1), empty_cache()),
        ("k", keys(2)[:, :8], slots(0, 1), empty_cache()),
        ("slots", keys(2), slots(0, 1, 2), empty_cache()),
        ("slots", keys(2), slots(0, 1).int(), empty_cache()),
        ("k_cache", keys(2), slots(0, 1), empty_cache().float()),
        ("k_cache", keys(2), slots(0, 1), empty_cache()[:, ::2]),
        ("k_cache", keys(2), slots(0, 1), empty_cache()[0]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(
    name: str, k: Tensor, where: Tensor, cache: Tensor
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        k_cache.insert(k, where, cache)
