"""Tokens that are written into a latent KV cache are what attention reads there."""

import pytest
import torch

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla.layout import FP8_TOKEN_BYTES, LATENT, ROPE, decode_tokens

BLOCKS, PAGE = 3, 4


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-3, 3, count).unsqueeze(1)
    latent = torch.randn(count, LATENT, generator=generator) * scale
    rope = torch.randn(count, ROPE, generator=generator)
    return latent.to(torch.bfloat16), rope.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_kept_and_others_untouched(dtype: torch.dtype) -> None:
    latent, rope = tokens(4)
    cache = torch.full((BLOCKS, PAGE, LATENT + ROPE), 7, dtype=dtype)
    sparse_mla.insert(latent, rope, torch.tensor([9, -1, 2]), cache)
    flat = cache.flatten(0, 1)
    expected = torch.cat([latent, rope], 1).to(dtype)
    assert torch.equal(flat[9], expected[0])
    assert torch.equal(flat[2], expected[2])
    others = [slot for slot in range(BLOCKS * PAGE) if slot not in (2, 9)]
    assert bool((flat[others] == 7).all())


def test_fp8_ds_mla_is_read_as_it_is_written() -> None:
    latent, rope = tokens(5)
    cache = torch.zeros(BLOCKS, PAGE, FP8_TOKEN_BYTES, dtype=torch.uint8)
    sparse_mla.insert(latent, rope, torch.tensor([11, 0, 5, 100, 3]), cache)
    read = decode_tokens(cache).flatten(0, 1)[[11, 0, 5, 3]]
    written = torch.cat([latent, rope], 1).float()[[0, 1, 2, 4]]
    assert torch.equal(read[:, LATENT:], written[:, LATENT:])
    group = written[:, :LATENT].abs().unflatten(1, (4, -1)).amax(-1, keepdim=True)
    error = (read - written)[:, :LATENT].unflatten(1, (4, -1)).abs()
    # Half of e4m3's last place of the largest value, and what fp32 rounds.
    assert bool((error <= group / 448 * 16.1).all())
    assert bool((error.amax(-1, keepdim=True) > 0).all())


def test_a_group_of_zeros_has_a_scale() -> None:
    cache = torch.full((1, 1, FP8_TOKEN_BYTES), 255, dtype=torch.uint8)
    zeros = torch.zeros(1, LATENT, dtype=torch.bfloat16)
    sparse_mla.insert(zeros, zeros[:, :ROPE], torch.tensor([0]), cache)
    assert torch.equal(decode_tokens(cache), torch.zeros(1, 1, LATENT + ROPE))


@pytest.mark.parametrize(
    ("latent", "rope", "slots", "names"),
    [
        ((2, 500), (2, ROPE), 2, "latent"),
        ((2, LATENT), (1, ROPE), 2, "rope"),
        ((2, LATENT), (2, ROPE), 3, "slots"),
    ],
)
def test_wrong_shapes_are_named(
    latent: tuple[int, int], rope: tuple[int, int], slots: int, names: str
) -> None:
    cache = torch.zeros(1, 4, LATENT + ROPE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"^{names}: "):
        sparse_mla.insert(torch.zeros(latent), torch.zeros(rope), torch.arange(slots), cache)
