"""Selection within a tile of scores: device functions.

A score's key is an unsigned integer of the same order, 0 for what is never chosen.
"""

import triton
import triton.language as tl

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
def threshold(keys, wanted, SLACK: tl.constexpr):
    """The `wanted`-th largest of a tile's keys, or a smaller one with up to SLACK more above it;
    and how many of the keys that equal it are wanted, 0 for all. 0 if all keys are wanted.
    """
    top = tl.max(keys, 0)
    low = tl.full((), 0, tl.uint32)
    exact = tl.sum((keys > 0).to(tl.int32), 0) <= wanted
    bit = tl.full((), 31, tl.int32)
    while (bit >= 0) & (exact == 0):
        trial = low | (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))
        if trial <= top:
            number = tl.sum((keys >= trial).to(tl.int32), 0)
            if number >= wanted:
                low = trial
                exact = number <= wanted + SLACK
        bit -= 1
    above = tl.sum((keys > low).to(tl.int32), 0)
    return low, tl.where(exact, 0, wanted - above)


@triton.jit
def places(keys, low, need):
    """From `threshold`'s answer: whether each key is chosen, and how many are before it.

    Of the keys that equal `low` the first `need` are chosen, with need 0 all.
    """
    tied = ((keys == low) & (need > 0)).to(tl.int32)
    above = ((keys >= low) & (keys > 0)).to(tl.int32) - tied
    before = tl.cumsum(above | (tied << 16), 0)  # of a tile of less than 2^16
    above_before = (before & 0xFFFF) - above
    tied_before = (before >> 16) - tied
    chosen = (above == 1) | ((tied == 1) & (tied_before < need))
    return chosen, above_before + tl.minimum(tied_before, need)
