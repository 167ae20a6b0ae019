"""Selection from a list in memory of any length, by one program: device functions.

The list comes in pieces, one after the other: a row of scores, or what the row's splits kept as
candidates. It is read once for every two bits of the threshold, so this is for what the fast
paths cannot do: pivots that the sample got wrong, many equal scores, k in the thousands.
"""

import triton
import triton.language as tl

from indexer_service.kernels.topk.candidates import tell_nan
from indexer_service.kernels.topk.selection import fill
from indexer_service.kernels.topk.tile import NEVER, keys_of, places

NO_KEY = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _length(length, lengths, piece, listed):
    return tl.load(lengths + piece, mask=listed, other=length)


@triton.jit
def _block(source, piece, at, length, capacity, listed, BLOCK: tl.constexpr):
    """Keys of BLOCK entries from `at` on, and where their scores are."""
    entry = at + tl.arange(0, BLOCK)
    start = tl.where(listed, tl.cast(piece, tl.int64) * (2 * capacity), 0)
    score = source + start + entry
    return keys_of(tl.load(score, mask=entry < length, other=NEVER)), score, entry


@triton.jit
def _range(source, lengths, pieces, length, capacity, listed, BLOCK: tl.constexpr):
    """Smallest and largest key of what may be chosen."""
    top = tl.zeros((BLOCK,), tl.uint32)
    bottom = tl.full((BLOCK,), NO_KEY, tl.uint32)
    for piece in range(pieces):
        size = _length(length, lengths, piece, listed)
        for at in range(0, size, BLOCK):
            keys, _, _ = _block(source, piece, at, size, capacity, listed, BLOCK)
            top = tl.maximum(top, keys)
            bottom = tl.minimum(bottom, tl.where(keys > 0, keys, NO_KEY).to(tl.uint32))
    return tl.min(bottom, 0), tl.max(top, 0)


@triton.jit
def _count(source, lengths, pieces, length, capacity, listed, low, bits, BLOCK: tl.constexpr):
    """How many keys are >= low + (1, 2, 3) << bits."""
    one = tl.zeros((BLOCK,), tl.int32)
    two = tl.zeros((BLOCK,), tl.int32)
    three = tl.zeros((BLOCK,), tl.int32)
    for piece in range(pieces):
        size = _length(length, lengths, piece, listed)
        for at in range(0, size, BLOCK):
            keys, _, _ = _block(source, piece, at, size, capacity, listed, BLOCK)
            digit = (tl.maximum(keys, low) - low) >> bits.to(tl.uint32)
            one += (digit >= 1).to(tl.int32)
            two += (digit >= 2).to(tl.int32)
            three += (digit >= 3).to(tl.int32)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _threshold(source, lengths, pieces, length, capacity, listed, wanted, BLOCK: tl.constexpr):
    """As `tile.threshold`; if all are wanted, the smallest key and at least as many as have it."""
    low, top = _range(source, lengths, pieces, length, capacity, listed, BLOCK)
    need = tl.full((), 0, tl.int32)
    # The wanted-th largest key, or else the smallest, lies in [low, low + 4 << bits).
    bits = tl.full((), 0, tl.int32)
    while ((top - low) >> bits.to(tl.uint32)) > 3:
        bits += 2
    unknown = True
    while unknown:
        one, two, three = _count(
            source, lengths, pieces, length, capacity, listed, low, tl.maximum(bits, 0), BLOCK
        )
        if bits < 0:
            need = wanted - one  # low is the key, and so many are above it
            unknown = False
        else:
            digit = (one >= wanted).to(tl.int32) + (two >= wanted).to(tl.int32)
            digit += (three >= wanted).to(tl.int32)
            low += digit.to(tl.uint32) << bits.to(tl.uint32)
            unknown = (one != wanted) & (two != wanted) & (three != wanted)
        bits -= 2
    return low, need


@triton.jit
def tell_nan_in_memory(scores, length, nan, mark, BLOCK: tl.constexpr):
    """`tell_nan` of a whole row, for who does not stream it otherwise."""
    for at in range(0, length, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        tell_nan(tl.load(scores + entry, mask=entry < length, other=NEVER), nan, mark)


@triton.jit
def select_from_memory(
    source, lengths, pieces, length, capacity, listed, k, shift, out, BLOCK: tl.constexpr
):
    """Write the indices of the k largest scores, plus `shift`, and -1 after them.

    listed: there are `lengths[piece]` scores from source + piece * 2 * capacity on, their indices
    `capacity` further on. Otherwise it is one piece of `length` scores.
    """
    low, need = _threshold(source, lengths, pieces, length, capacity, listed, k, BLOCK)
    written = tl.full((), 0, tl.int32)
    tied_left = need
    for piece in range(pieces):
        size = _length(length, lengths, piece, listed)
        for at in range(0, size, BLOCK):
            keys, score, entry = _block(source, piece, at, size, capacity, listed, BLOCK)
            inside = (entry < size) & listed
            index = tl.load(score + capacity, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            index = tl.where(listed, index, entry)
            # When no tie is wanted any more, the next key is the threshold.
            used_up = (need > 0) & (tied_left == 0)
            bound = tl.where(used_up, low + 1, low).to(tl.uint32)
            chosen, before = places(keys, bound, tied_left)
            tl.store(out + written + before, index + shift, mask=chosen)
            tied = ((keys == low) & (need > 0)).to(tl.int32)
            both = tl.sum(chosen.to(tl.int32) + (tied << 16), 0)
            written += both & 0xFFFF
            tied_left = tl.maximum(tied_left - (both >> 16), 0)
    fill(out, written, k)
