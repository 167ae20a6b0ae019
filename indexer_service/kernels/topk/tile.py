"""Selection within a tile of scores in registers: device functions.

A score's key is an unsigned integer of the same order, 0 for what is never chosen.
"""

import triton
import triton.language as tl

from indexer_service.kernels.topk import ptx

NEVER = tl.constexpr(float("-inf"))
"""A score that is never chosen."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest score that may be chosen."""


@triton.jit
def keys_of(scores):
    """fp32 -> uint32 in the same order; -0.0 as +0.0; 0 for NaN and -inf."""
    bits = scores.to(tl.uint32, bitcast=True)
    flip = (scores.to(tl.int32, bitcast=True) >> 31).to(tl.uint32, bitcast=True) | 0x80000000
    keys = tl.where(scores == 0.0, 0x80000000, bits ^ flip).to(tl.uint32)
    return tl.where(scores >= LOWEST, keys, 0).to(tl.uint32)


@triton.jit
def score_of(key):
    """The score that has this key; LOWEST for 0."""
    flip = tl.where(key >= 0x80000000, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    score = (key ^ flip).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(key == 0, LOWEST, score)


@triton.jit
def _classify_portably(keys, wanted, SLACK: tl.constexpr):
    """As `classify`, a bit at a time."""
    top = tl.max(keys, 0)
    low = tl.full((), 1, tl.uint32)
    found = tl.sum((keys > 0).to(tl.int32), 0) <= wanted
    bit = tl.full((), 31, tl.int32)
    exact = found
    low = tl.where(found, low, 0).to(tl.uint32)
    while (bit >= 0) & (exact == 0):
        trial = low | (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))
        if trial <= top:
            number = tl.sum((keys >= trial).to(tl.int32), 0)
            if number >= wanted:
                low = trial
                exact = number <= wanted + SLACK
        bit -= 1
    above = tl.sum((keys > low).to(tl.int32), 0)
    need = tl.where(exact, 0, wanted - above)
    tied = (keys == low) & (exact == 0)
    verdict = tl.where(tied, 2, (keys >= low).to(tl.int32))
    return verdict | (need << 2)


@triton.jit
def classify(
    keys, wanted, SLACK: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr
):
    """Which of a tile's keys are among its `wanted` largest (SLACK more may be, too).

    uint32 [N] -> int32 [N]: in bits 0-1 whether a key is not chosen (0), chosen (1), or tied (2)
    for the last `need` places, which is in the bits above. Without ties need is 0.
    """
    if PTX:
        E: tl.constexpr = N // (32 * WARPS)
        return tl.inline_asm_elementwise(
            ptx.classify(E, WARPS, SLACK), ptx.constraints(E), [keys, wanted],
            dtype=tl.int32, is_pure=False, pack=E,
        )  # fmt: skip
    return _classify_portably(keys, wanted, SLACK)


@triton.jit
def places(verdict):
    """From `classify`'s answer: whether each is chosen, and how many are chosen before it."""
    above = verdict & 1
    tied = (verdict >> 1) & 1
    need = verdict >> 2
    before = tl.cumsum(above | (tied << 16), 0)  # of a tile of less than 2^16
    above_before = (before & 0xFFFF) - above
    tied_before = (before >> 16) - tied
    chosen = (above == 1) | ((tied == 1) & (tied_before < need))
    return chosen, above_before + tl.minimum(tied_before, need)


@triton.jit
def scatter(pointers, values, mask, PTX: tl.constexpr):
    """As tl.store of 32-bit values, but where they are: tl.store first sorts its operands into a
    layout of one value a thread, through shared memory, for the case that neighbours meet.
    """
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred there;
            setp.ne.b32 there, $3, 0;
            @there st.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,~{memory}", [pointers.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointers, values, mask=mask)
