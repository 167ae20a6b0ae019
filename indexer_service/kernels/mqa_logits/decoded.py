"""e4m3 queries or keys as fp16, once for all that they will be multiplied with."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.e4m3 import decode_e4m3

_BLOCK = 4096


@triton.jit(do_not_specialize=("count",))
def decode_kernel(codes, out, count: tl.int64, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """uint8 [count] -> fp16 [count], each value times 2^-8."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = decode_e4m3(tl.load(codes + at, mask=inside, other=0), PACKED)
    tl.store(out + at, value, mask=inside)


def decode_codes(codes: Tensor) -> Tensor:
    """uint8, contiguous and aligned to 16 bytes -> fp16 of the same shape."""
    out = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
    grid = (-(-codes.numel() // _BLOCK),)
    decode_kernel[grid](
        codes, out, codes.numel(), BLOCK=_BLOCK, PACKED=codes.device.type == "cuda", num_warps=4
    )
    return out
