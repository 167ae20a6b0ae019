"""Keys and queries of e4m3 as words of four codes: products of 16 bits with little decoding.

A matrix product may take its inner dimension in any order. So a word of four consecutive codes is
never taken apart into neighbours: one product takes the first codes of all words, another the
second ones, and so on, and each decodes two words' codes at once.
"""

import triton
import triton.language as tl

from indexer_service.kernels.e4m3 import decode_e4m3


@triton.constexpr_function
def _two_codes(place):
    """Puts two words' codes where fp16 has sign, exponent and mantissa.

    Multiplications shift, since the unit for integers has more to do than the one for them.
    Then 35840 times a code of NaN, and of nothing else, is infinite, and 0 times that is NaN.
    """
    selector = (4 + place) << 8 | place
    return f"""{{
    .reg .b32 codes, sign, magnitude, value, large, zero;
    prmt.b32 codes, $1, $2, {selector:#x};
    mul.lo.u32 magnitude, codes, 128;
    and.b32 magnitude, magnitude, 0x3f803f80;
    mul.lo.u32 sign, codes, 256;
    lop3.b32 value, sign, 0x80008000, magnitude, 0xea;
    mov.b32 large, 0x78607860;
    mov.b32 zero, 0;
    mul.rn.f16x2 large, value, large;
    fma.rn.f16x2 $0, large, zero, value;
    }}"""


@triton.jit
def decode_place(words, PLACE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """int32 words of four codes -> fp16 of the same shape: code PLACE of each, times 2^-8."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _two_codes(PLACE), "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    return decode_e4m3(((words >> (8 * PLACE)) & 0xFF).to(tl.uint8), False)
