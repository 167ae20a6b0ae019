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
def decode_e4m3(words, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """int32 [ROWS, 32], four codes each -> bf16 [ROWS, 128].

    NaN codes become NaN.
    """
    if NATIVE:
        v0 = _native(words)
        v1 = _native(words >> 8)
        v2 = _native(words >> 16)
        v3 = _native(words >> 24)
    else:
        low = _placed(((words & 0xFF) << 8) | ((words & 0xFF00) << 16))
        high = _placed(((words >> 8) & 0xFF00) | (words & -0x1000000))
        v0 = _software(low)
        v1 = _software(low >> 16)
        v2 = _software(high)
        v3 = _software(high >> 16)
    # Element [.., c, a, b] of the join is code 2a + b of word c.
    return tl.join(tl.join(v0, v2), tl.join(v1, v3)).reshape(ROWS, 128)


@triton.jit
def _native(words):
    return words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit
def _placed(pairs):
    """Codes in the upper bytes of 16-bit halves -> bf16's bits of their values times 2^-120.

    The two NaN codes get all of bf16's exponent bits, which makes them NaN.
    """
    magnitude = pairs & 0x7F007F00
    nan = ((magnitude + 0x01000100) >> 1) & 0x40004000
    return (pairs & -0x7FFF8000) | (magnitude >> 4) | ((nan << 1) - (nan >> 7))


@triton.jit
def _software(halves):
    # bf16 has fp32's exponents, and fp32 arithmetic is there on every GPU.
    values = halves.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (values.to(tl.float32) * _TO_VALUE).to(tl.bfloat16)
