"""e4m3 queries or keys as fp16, once for all that they will be multiplied with."""

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


def decode_codes(codes: Tensor, room: Tensor, enabled: Tensor | None) -> Tensor:
    """fp16 of the same shape, in the first rows of `room`.

    Args:
        codes: uint8 [n, ...], contiguous, aligned to 16 bytes, each of n whole 16 of them.
        room: fp16 [n or more, ...], contiguous.
        enabled: int32 [1]; with 0 in it nothing is decoded.
    """
    vectors = codes.numel() // _VECTOR
    decode_kernel[(-(-vectors // _VECTORS),)](
        codes, room, enabled, vectors, BLOCK=_VECTORS, VECTOR=_VECTOR,
        PACKED=codes.device.type == "cuda", num_warps=4,
    )  # fmt: skip
    return room[: len(codes)]
