"""e4m3 values on their way to bf16: device functions.

e4m3 is exact in bf16. Moved to bf16's place, an e4m3 value's exponent and mantissa mean the value
times 2^(7-127); one multiplication by 2^120 (exact, subnormals too) restores it. That needs no
fp8 instruction, and is the way below SM89. From SM89 the conversion is an instruction of its own,
but only to fp16.
"""

import triton
import triton.language as tl

_TO_VALUE = tl.constexpr(2.0**120)


@triton.jit
def decode_e4m3(codes, NATIVE: tl.constexpr):
    """uint8 codes of any shape -> bf16. NaN codes become NaN natively, ±480 in software."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    wide = codes.to(tl.uint16)
    placed = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
    # bf16 has fp32's exponents, and fp32 arithmetic is there on every GPU.
    return (placed.to(tl.bfloat16, bitcast=True).to(tl.float32) * _TO_VALUE).to(tl.bfloat16)
