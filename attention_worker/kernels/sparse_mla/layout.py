"""How a cached token of multi-head latent attention is laid out.

bf16 or fp16: 512 latent values, then 64 rope values (or none). fp8_ds_mla (source: vLLM and
FlashMLA): 656 bytes, which are 512 e4m3 values, four fp32 scales, each for 128 of the values,
and 64 bf16 rope values, which are not quantised.
"""

import torch
from torch import Tensor

LATENT = 512
ROPE = 64
GROUP = 128
"""Latent values that share a scale."""

_E4M3_MAX = 448.0
_SMALLEST = torch.finfo(torch.float32).tiny * _E4M3_MAX
"""Of a group's magnitudes: what is below has a scale that is no normal number."""

_SCALES_AT = LATENT
_ROPE_AT = _SCALES_AT + 4 * (LATENT // GROUP)
FP8_TOKEN_BYTES = _ROPE_AT + 2 * ROPE


def decode_tokens(tokens: Tensor) -> Tensor:
    """Cached tokens [..., width], in any of the forms, -> fp32 [..., 576 or 512]."""
    if tokens.dtype != torch.uint8:
        return tokens.to(torch.float32)
    values = tokens[..., :_SCALES_AT].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = tokens[..., _SCALES_AT:_ROPE_AT].contiguous().view(torch.float32)
    rope = tokens[..., _ROPE_AT:].contiguous().view(torch.bfloat16).to(torch.float32)
    latent = values.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)
    return torch.cat([latent.flatten(-2), rope], dim=-1)


def encode_tokens(latent: Tensor, rope: Tensor, dtype: torch.dtype) -> Tensor:
    """Latent [T, 512] and rope values [T, 64] -> cached tokens [T, 576], or uint8 [T, 656].

    Of fp8_ds_mla a group's scale is its largest magnitude over 448.
    """
    if dtype != torch.uint8:
        return torch.cat([latent, rope], dim=-1).to(dtype)
    groups = latent.to(torch.float32).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp_min(_SMALLEST) / _E4M3_MAX
    values = (groups / scales.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX)
    parts = (values.flatten(-2).to(torch.float8_e4m3fn), scales, rope.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
