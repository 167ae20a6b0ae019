"""Which tiles of keys a program of the paged kernels takes, by lengths read on the device.

All requests' tiles stand in a row and each program takes an even part of it, so that the real
lengths decide the work, however long a request may become. The same device functions serve Triton
and Gluon: nothing here names a layout.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(2**31 - 1)
"""Beyond any position."""

LENGTHS_AT_ONCE = tl.constexpr(128)
"""Requests whose lengths a program reads together."""


@triton.jit
def longest_row(
    seq_lens, request, inside, length_request, length_row, limit, LENGTHS: tl.constexpr
):  # fmt: skip
    """Keys that the longest row of each request sees; LENGTHS: lengths that a request has."""
    at = seq_lens + tl.cast(request, tl.int64) * length_request
    longest = tl.load(at, mask=inside, other=0)
    for row in tl.static_range(1, LENGTHS):
        longest = tl.maximum(longest, tl.load(at + row * length_row, mask=inside, other=0))
    return tl.minimum(tl.maximum(longest, 0), limit)


@triton.jit
def seeing_request(
    seq_lens, request, batch, length_request, length_row, limit, LENGTHS: tl.constexpr
):  # fmt: skip
    """The first request, from this one on, with a row that sees a key; keys of its longest row."""
    longest = longest_row(seq_lens, request, True, length_request, length_row, limit, LENGTHS)
    while (longest == 0) & (request < batch - 1):
        request += 1
        longest = longest_row(seq_lens, request, True, length_request, length_row, limit, LENGTHS)
    return request, longest


@triton.jit
def row_length(
    seq_lens, request, j, inside, length_request, length_row, back, limit, NEXT_N: tl.constexpr
):  # fmt: skip
    """Keys that row j of a request sees; back: 1 where rows share one length, else 0."""
    at = seq_lens + tl.cast(request, tl.int64) * length_request + j * length_row
    length = tl.load(at, mask=inside, other=0) + (j + 1 - NEXT_N) * back
    return tl.minimum(tl.maximum(length, 0), limit)


@triton.jit
def _place_rows(
    request, inside, starts, units, seq_lens, row_at, row_end, arrived, limit, span, window,
    length_request, length_row, back, NEXT_N: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Tell where each row of some requests lies and how long it is."""
    begins = tl.cast(starts, tl.int64) * (NEXT_N * PADDING) - window * span
    mine = (begins >= 0) & (begins < span)
    for j in range(NEXT_N):
        row = tl.cast(request, tl.int64) * NEXT_N + j
        at = begins + j * tl.cast(units, tl.int64) * PADDING
        length = row_length(
            seq_lens, request, j, inside, length_request, length_row, back, limit, NEXT_N
        )  # fmt: skip
        tl.store(row_at + row, tl.where(mine, at, -1), mask=inside)
        tl.store(row_end + row, length, mask=inside)
        tl.store(arrived + row, length * 0, mask=inside)


@triton.jit
def _part(low, high, TILES: tl.constexpr, PROGRAMS: tl.constexpr):
    """First and end tile of this program, of the tiles between two units."""
    tiles = (high - low) * TILES
    program = tl.program_id(0)
    each, more = tiles // PROGRAMS, tiles % PROGRAMS
    begin = low * TILES + program * each + tl.minimum(program, more)
    return begin, begin + each + tl.where(program < more, 1, 0)


@triton.jit
def share(
    some, seq_lens, row_at, row_end, arrived, batch, limit, span, window, length_request,
    length_row, back, NEXT_N: tl.constexpr, LENGTHS: tl.constexpr, TILES: tl.constexpr,
    PADDING: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """This program's first and end tile, the request of the first, and where that one begins.

    some: 0 to LENGTHS_AT_ONCE - 1. A unit of PADDING keys has TILES tiles; where a request begins
    is in units. With row_at, only this window's requests count, and the rows' places are written,
    by the last programs, which are the last to have a tile.
    """
    last = PROGRAMS - 1 - tl.program_id(0)
    request, at = 0, 0
    if batch == 1:
        # As below, without sums over the batch: a single request must not wait for them.
        longest = longest_row(seq_lens, 0, True, length_request, length_row, limit, LENGTHS)
        units = tl.cdiv(longest, PADDING)
        if row_at is not None:
            if last == 0:
                _place_rows(
                    0, True, 0, units, seq_lens, row_at, row_end, arrived, limit, span, window,
                    length_request, length_row, back, NEXT_N, PADDING,
                )  # fmt: skip
            units = tl.where(window == 0, units, 0)
        begin, end = _part(0, units, TILES, PROGRAMS)
    else:
        ends = some * 0
        low, high, before = FAR, 0, 0
        for first in range(0, batch, LENGTHS_AT_ONCE):
            request_ = first + some
            inside = request_ < batch
            longest = longest_row(
                seq_lens, request_, inside, length_request, length_row, limit, LENGTHS
            )  # fmt: skip
            units = tl.cdiv(longest, PADDING)
            ends = before + tl.cumsum(units, 0)
            before = tl.max(ends, 0)
            if row_at is None:
                low, high = 0, before
            else:
                if last == first // LENGTHS_AT_ONCE % PROGRAMS:
                    _place_rows(
                        request_, inside, ends - units, units, seq_lens, row_at, row_end, arrived,
                        limit, span, window, length_request, length_row, back, NEXT_N, PADDING,
                    )  # fmt: skip
                if (window == 0) & (tl.cast(before, tl.int64) * (NEXT_N * PADDING) <= span):
                    low, high = 0, before
                else:
                    begins = tl.cast(ends - units, tl.int64) * (NEXT_N * PADDING) - window * span
                    mine = inside & (begins >= 0) & (begins < span)
                    low = tl.minimum(low, tl.min(tl.where(mine, ends - units, FAR), 0))
                    high = tl.maximum(high, tl.max(tl.where(mine, ends, 0), 0))
        begin, end = _part(tl.minimum(low, high), high, TILES, PROGRAMS)
        unit = begin // TILES
        if batch <= LENGTHS_AT_ONCE:
            request = tl.sum(tl.where(ends <= unit, 1, 0), 0)
            at = tl.max(tl.where(ends <= unit, ends, 0), 0)
        elif begin < end:
            before = 0
            for first in range(0, batch, LENGTHS_AT_ONCE):
                longest = longest_row(
                    seq_lens, first + some, first + some < batch, length_request, length_row,
                    limit, LENGTHS,
                )  # fmt: skip
                ends = before + tl.cumsum(tl.cdiv(longest, PADDING), 0)
                before = tl.max(ends, 0)
                request += tl.sum(tl.where(ends <= unit, 1, 0), 0)
                at = tl.maximum(at, tl.max(tl.where(ends <= unit, ends, 0), 0))
    return begin, end, request, at
