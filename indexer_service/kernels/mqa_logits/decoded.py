"""e4m3 queries or keys as fp16, once for all that they will be multiplied with."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from indexer_service.kernels.e4m3 import decode_e4m3

_VECTOR = 16
_VECTORS = 256
"""A program's, so that a thread has two."""


@triton.jit(do_not_specialize=("vectors",), do_not_specialize_on_alignment=("enabled",))
def decode_kernel(
    codes, out, enabled, vectors, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr
):
    """uint8 [vectors, VECTOR] -> fp16, each value times 2^-8; nothing if the word enabled is 0."""
    if enabled is not None and tl.load(enabled) == 0:
        return
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = vector[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    inside = (vector < vectors)[:, None]
    value = decode_e4m3(tl.load(codes + at, mask=inside, other=0), PACKED)
    tl.store(out + at, value, mask=inside)


def decode_codes(codes: Tensor, enabled: Tensor | None) -> Tensor:
    """uint8, contiguous, aligned to 16 bytes and whole 16 of them -> fp16 of the same shape.

    enabled: int32 [1]; with 0 in it nothing is decoded.
    """
    out = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
    vectors = codes.numel() // _VECTOR
    decode_kernel[(-(-vectors // _VECTORS),)](
        codes, out, enabled, vectors, BLOCK=_VECTORS, VECTOR=_VECTOR,
        PACKED=codes.device.type == "cuda", num_warps=4,
    )  # fmt: skip
    return out
