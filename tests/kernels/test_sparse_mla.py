"""sparse_mla: attention against float64 loops in every input form, and the slot mapping."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla import reference
from tests.kernels import naive

HEADS, PAGE, BLOCKS = 3, 4, 6
SLOTS = BLOCKS * PAGE
SCALE = 0.07


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def query(tokens: int = 5, width: int = 576, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn((tokens, HEADS, width), generator=source(1)).to(dtype)


def cache(width: int = 576, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn((BLOCKS, PAGE, width), generator=source(2)).to(dtype)


def chosen_slots() -> Tensor:
    """Five tokens: all valid, some, one in the middle, slots beyond the cache, none."""
    rows = [
        [0, 5, 7, 23, 11, 2],
        [3, 1, 22, -1, -1, -1],
        [-1, -1, 9, -1, -1, -1],
        [SLOTS, 4, 2**31 - 1, -5, 6, -1],
        [-1] * 6,
    ]
    return torch.tensor(rows, dtype=torch.int32)


def fp8_cache() -> tuple[Tensor, Tensor]:
    """656-byte tokens, and what they hold as float64 [slots, 576] (decoded by loops)."""
    codes = torch.randint(0, 0x7F, (SLOTS, 512), generator=source(3), dtype=torch.uint8)
    scales = torch.rand((SLOTS, 4), generator=source(4)) * 0.01
    rope = torch.randn((SLOTS, 64), generator=source(5)).to(torch.bfloat16)
    tokens = torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    values = torch.from_numpy(naive.e4m3(codes))
    for group in range(4):
        values[:, 128 * group : 128 * (group + 1)] *= scales[:, group : group + 1].double()
    return tokens.view(BLOCKS, PAGE, 656), torch.cat([values, rope.double()], dim=1)


def check(q: Any, whole_q: Tensor, kv: Tensor, tokens: Tensor, slots: Tensor) -> None:
    out, lse = sparse_mla.attend(q, kv, slots, SCALE, return_lse=True)
    assert out.shape == (len(slots), HEADS, 512)
    assert out.dtype == whole_q.dtype
    assert lse.dtype == torch.float32
    for row, chosen in enumerate(slots.tolist()):
        expected, expected_lse = naive.attention(whole_q[row], tokens, chosen, SCALE)
        rounding = 1e-2 if whole_q.dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(
            out[row].double(), torch.from_numpy(expected), rtol=rounding, atol=1e-5
        )
        torch.testing.assert_close(
            lse[row].double(), torch.from_numpy(expected_lse), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_equals_float64_loops(width: int, dtype: torch.dtype) -> None:
    q, kv = query(width=width, dtype=dtype), cache(width, dtype)
    check(q, q, kv, kv.flatten(0, 1), chosen_slots())


def test_attention_over_fp8_ds_mla_tokens() -> None:
    kv, tokens = fp8_cache()
    check(query(), query(), kv, tokens, chosen_slots())


def test_latent_and_rope_may_come_apart_with_any_strides() -> None:
    whole, kv = query(), cache()
    latent = whole[..., :512].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    rope = whole.flip(0)[..., 512:].flip(0)
    assert not latent.is_contiguous()
    together = sparse_mla.attend(whole, kv, chosen_slots(), SCALE)
    assert torch.equal(sparse_mla.attend((latent, rope), kv, chosen_slots(), SCALE), together)


def test_pages_within_a_larger_buffer() -> None:
    kv = cache()
    buffer = torch.full((BLOCKS, 2, PAGE, 600), torch.nan, dtype=torch.bfloat16)
    buffer[:, 1, :, :576] = kv
    strided = buffer[:, 1, :, :576]
    expected = sparse_mla.attend(query(), kv, chosen_slots(), SCALE)
    assert torch.equal(sparse_mla.attend(query(), strided, chosen_slots(), SCALE), expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_unreferenced_slots_hold_does_not_leak(poison: float) -> None:
    kv, slots = cache(), chosen_slots()
    expected = sparse_mla.attend(query(), kv, slots, SCALE, return_lse=True)
    referenced = {slot for row in slots.tolist() for slot in row}
    poisoned = kv.clone().flatten(0, 1)
    poisoned[[slot for slot in range(SLOTS) if slot not in referenced]] = poison
    poisoned[0] = poison  # where a masked -1 might be redirected to; only row 0 refers to it
    ours = sparse_mla.attend(query(), poisoned.view_as(kv), slots, SCALE, return_lse=True)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine[1:], theirs[1:])


def test_rows_without_a_valid_slot_give_zeros_and_minus_infinity() -> None:
    out, lse = sparse_mla.attend(query(), cache(), chosen_slots(), SCALE, return_lse=True)
    assert (out[4] == 0).all()
    assert torch.isneginf(lse[4]).all()


@pytest.mark.parametrize("shape", [(5, 0), (0, 6)], ids=["no-slots", "no-tokens"])
def test_nothing_to_attend_to(shape: tuple[int, int]) -> None:
    slots = torch.zeros(shape, dtype=torch.int32)
    out, lse = sparse_mla.attend(query(shape[0]), cache(), slots, SCALE, return_lse=True)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_large_scores_do_not_overflow() -> None:
    q, kv = query() * 300, cache()
    out = sparse_mla.attend(q, kv, chosen_slots(), 1.0)
    assert out.isfinite().all()


def test_chunks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sparse_mla.attend(query(), cache(), chosen_slots(), SCALE)
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 1)
    ours = sparse_mla.attend(query(), cache(), chosen_slots(), SCALE)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q", {"q": query(width=100)}),
        ("q", {"q": query().to(torch.int32)}),
        (r"q\[1\]", {"q": (query(width=512), query(width=63))}),
        (r"q\[0\]", {"q": (query(width=64), query(width=64))}),
        ("kv_cache", {"kv_cache": cache(512)}),
        ("kv_cache", {"kv_cache": cache().float()}),
        ("kv_cache", {"kv_cache": fp8_cache()[0][..., :600]}),
        ("kv_cache", {"kv_cache": fp8_cache()[0], "q": query(width=512)}),
        ("slots", {"slots": chosen_slots().long()}),
        ("slots", {"slots": chosen_slots()[:4]}),
        ("num_kv_splits", {"num_kv_splits": 0}),
        ("impl", {"impl": "flash"}),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(name: str, changes: dict[str, Any]) -> None:
    good = {"q": query(), "kv_cache": cache(), "slots": chosen_slots(), "scale": SCALE}
    with pytest.raises(ValueError, match=rf"^{name}: .* \(fix: .+\)$"):
        sparse_mla.attend(**{**good, **changes})


TABLE = torch.tensor([[5, 2], [0, 9]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("index", "request_number", "slot"),
    [(0, 0, 20), (3, 0, 23), (4, 0, 8), (4, 1, 36), (-1, 0, -1), (-1, 9, -1)],
)
def test_to_slots_follows_the_table(index: int, request_number: int, slot: int) -> None:
    count = torch.zeros(1, dtype=torch.int32)
    ours = sparse_mla.to_slots(
        torch.tensor([[index]], dtype=torch.int32),
        torch.tensor([request_number], dtype=torch.int32),
        TABLE, PAGE, invalid_count=count,
    )  # fmt: skip
    assert ours.dtype == torch.int32
    assert ours.tolist() == [[slot]]
    assert int(count) == 0


@pytest.mark.parametrize(
    ("index", "request_number", "table"),
    [
        (8, 0, TABLE),
        (2**31 - 1, 0, TABLE),
        (-2, 0, TABLE),
        (0, 2, TABLE),
        (0, -1, TABLE),
        (0, 0, TABLE - 10),
        (4, 1, TABLE),
        (0, 0, TABLE + 1),
        (0, 0, TABLE + 2**30),
    ],
    ids=[
        "past-the-table", "far-past", "below-minus-one", "request-past-the-table",
        "negative-request", "negative-page", "page-past-the-cache", "first-page-past-the-cache",
        "slot-above-int32",
    ],
)  # fmt: skip
def test_to_slots_counts_what_it_cannot_map(index: int, request_number: int, table: Tensor) -> None:
    count = torch.full((1,), 3, dtype=torch.int32)
    ours = sparse_mla.to_slots(
        torch.tensor([[index, -1, index]], dtype=torch.int32),
        torch.tensor([request_number], dtype=torch.int32),
        table, PAGE, pages=6, invalid_count=count,
    )  # fmt: skip
    assert ours.tolist() == [[-1, -1, -1]]
    assert int(count) == 3 + 2
