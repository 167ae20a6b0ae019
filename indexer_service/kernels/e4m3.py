"""e4m3 codes for dot products of 16 bits: a device function.

Below SM89 Triton has no e4m3 type, so the codes stay bytes. Moved to fp16's place, a code's
exponent and mantissa mean its value times 2^(7-15), exactly, subnormals too; who multiplies two
such values has a result times 2^-16. The two NaN codes get fp16's highest exponent bit, which
makes them NaN there.
"""

import triton
import triton.language as tl

SCALE_OF_PRODUCTS = tl.constexpr(2.0**16)
"""Restores a product of two decoded values (exact: a power of two)."""

_FOUR_CODES = tl.constexpr(
    """{
    .reg .b32 quiet, nan, low, high, low_nan, high_nan, shifted;
    and.b32 quiet, $2, 0x7f7f7f7f;
    add.u32 nan, quiet, 0x01010101;
    and.b32 nan, nan, 0x80808080;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    prmt.b32 low_nan, nan, 0, 0x1404;
    prmt.b32 high_nan, nan, 0, 0x3424;
    shr.b32 shifted, low, 1;
    and.b32 shifted, shifted, 0x3f803f80;
    lop3.b32 $0, low, 0x80008000, shifted, 0xea;
    shr.b32 low_nan, low_nan, 1;
    or.b32 $0, $0, low_nan;
    shr.b32 shifted, high, 1;
    and.b32 shifted, shifted, 0x3f803f80;
    lop3.b32 $1, high, 0x80008000, shifted, 0xea;
    shr.b32 high_nan, high_nan, 1;
    or.b32 $1, $1, high_nan;
    }"""
)


@triton.jit
def decode_e4m3(codes, PACKED: tl.constexpr):
    """uint8 codes -> fp16 of the same shape, each value times 2^-8.

    PACKED decodes four codes in one register, which only a GPU can; without it the same is
    written in Triton, for the interpreter.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            _FOUR_CODES, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    wide = codes.to(tl.uint16)
    magnitude = wide & 0x7F
    nan = tl.where(magnitude == 0x7F, 0x4000, 0).to(tl.uint16)
    return (((wide & 0x80) << 8) | (magnitude << 7) | nan).to(tl.float16, bitcast=True)
