"""e4m3 queries or keys as fp16, once for all that they will be multiplied with."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.e4m3 import decode_e4m3

_BLOCK = 4096


@triton.jit(do_not_specialize=("count",), do_not_specialize_on_alignment=("enabled",))
def decode_kernel(codes, out, enabled, count: tl.int64, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """uint8 [count] -> fp16 [count], each value times 2^-8; nothing if the word enabled is 0."""
    if enabled is not None and tl.load(enabled) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = decode_e4m3(tl.load(codes + at, mask=inside, other=0), PACKED)
    tl.store(out + at, value, mask=inside)


def decode_codes(codes: Tensor, enabled: Tensor | None) -> Tensor:
    """uint8, contiguous and aligned to 16 bytes -> fp16 of the same shape.

    enabled: int32 [1]; with 0 in it nothing is decoded.
    """
    out = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
    grid = (-(-codes.numel() // _BLOCK),)
    packed = codes.device.type == "cuda"
    decode_kernel[grid](
        codes, out, enabled, codes.numel(), BLOCK=_BLOCK, PACKED=packed, num_warps=4
    )
    return out
