"""Selection from a list in memory of any length, by one program: device functions.

The list comes in pieces, one after the other: a row of scores, or what the row's splits kept as
candidates. It is read once for every two bits of the threshold, so this is for what the fast
paths cannot do: pivots that the sample got wrong, many equal scores, k in the thousands.
"""

import triton
import triton.language as tl

from indexer_service.kernels.topk.tile import NEVER, keys_of, places, scatter

NO_KEY = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _piece(length, lengths, piece, LISTED: tl.constexpr):
    return tl.load(lengths + piece) if LISTED else length


@triton.jit
def _block(source, piece, at, length, capacity, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Keys and indices of BLOCK entries from `at` on."""
    entry = at + tl.arange(0, BLOCK)
    inside = entry < length
    if LISTED:
        scores = source + tl.cast(piece, tl.int64) * (2 * capacity)
        indices = (scores + capacity).to(tl.pointer_type(tl.int32))
        keys = keys_of(tl.load(scores + entry, mask=inside, other=NEVER))
        return keys, tl.load(indices + entry, mask=inside, other=0)
    else:
        return keys_of(tl.load(source + entry, mask=inside, other=NEVER)), entry


@triton.jit
def _range(source, lengths, pieces, length, capacity, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Smallest and largest key of what may be chosen, and how many there are."""
    top = tl.zeros((BLOCK,), tl.uint32)
    bottom = tl.full((BLOCK,), NO_KEY, tl.uint32)
    some = tl.zeros((BLOCK,), tl.int32)
    for piece in range(pieces):
        size = _piece(length, lengths, piece, LISTED)
        for at in range(0, size, BLOCK):
            keys, _ = _block(source, piece, at, size, capacity, BLOCK, LISTED)
            top = tl.maximum(top, keys)
            bottom = tl.minimum(bottom, tl.where(keys > 0, keys, NO_KEY).to(tl.uint32))
            some += (keys > 0).to(tl.int32)
    return tl.min(bottom, 0), tl.max(top, 0), tl.sum(some, 0)


@triton.jit
def _count(
    source, lengths, pieces, length, capacity, low, bits, BLOCK: tl.constexpr, LISTED: tl.constexpr
):
    """How many keys are >= low + (1, 2, 3) << bits."""
    one = tl.zeros((BLOCK,), tl.int32)
    two = tl.zeros((BLOCK,), tl.int32)
    three = tl.zeros((BLOCK,), tl.int32)
    for piece in range(pieces):
        size = _piece(length, lengths, piece, LISTED)
        for at in range(0, size, BLOCK):
            keys, _ = _block(source, piece, at, size, capacity, BLOCK, LISTED)
            digit = (tl.maximum(keys, low) - low) >> bits.to(tl.uint32)
            one += (digit >= 1).to(tl.int32)
            two += (digit >= 2).to(tl.int32)
            three += (digit >= 3).to(tl.int32)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def select_from_memory(
    source, lengths, pieces, length, capacity, wanted, shift, out,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write the `wanted` best indices, plus `shift`, to `out`; returns how many there were.

    LISTED: `lengths[piece]` scores at source + piece * 2 * capacity, their indices `capacity`
    further on. Otherwise it is one piece of `length` scores.
    """
    low, top, number = _range(source, lengths, pieces, length, capacity, BLOCK, LISTED)
    # All that are >= low are chosen if there are no more than wanted.
    exact = number <= wanted
    # Otherwise the wanted-th largest key lies in [low, low + 4 << bits).
    bits = tl.full((), 0, tl.int32)
    while ((top - low) >> bits.to(tl.uint32)) > 3:
        bits += 2
    unknown = (exact == 0) & (top > low)
    while unknown:
        one, two, three = _count(
            source, lengths, pieces, length, capacity, low, bits, BLOCK, LISTED
        )
        digit = (one >= wanted).to(tl.int32) + (two >= wanted).to(tl.int32)
        digit += (three >= wanted).to(tl.int32)
        exact = (one == wanted) | (two == wanted) | (three == wanted)
        low += digit.to(tl.uint32) << bits.to(tl.uint32)
        unknown = (exact == 0) & (bits > 0)
        bits = tl.maximum(bits - 2, 0)
    need = tl.full((), 0, tl.int32)
    if exact == 0:
        above, _, _ = _count(
            source, lengths, pieces, length, capacity, low, tl.full((), 0, tl.int32), BLOCK, LISTED
        )
        need = wanted - above

    written = tl.full((), 0, tl.int32)
    for piece in range(pieces):
        size = _piece(length, lengths, piece, LISTED)
        for at in range(0, size, BLOCK):
            keys, index = _block(source, piece, at, size, capacity, BLOCK, LISTED)
            tied = (keys == low) & (exact == 0)
            verdict = tl.where(tied, 2, ((keys >= low) & (keys > 0)).to(tl.int32))
            chosen, before = places(verdict | (need << 2))
            scatter(out + written + before, index + shift, chosen, PTX)
            written += tl.sum(chosen.to(tl.int32), 0)
            need -= tl.minimum(tl.sum(tied.to(tl.int32), 0), need)
    return written
