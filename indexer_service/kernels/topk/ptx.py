"""The k-th largest key of a tile in registers, in PTX: text for Triton's inline assembly.

Triton has no shared-memory atomics, and counting a histogram without them costs more than
everything else in a selection. The block is one call a thread for all the elements that the
thread holds, so that it may synchronise the program. Its meaning is `tile.classify_portably`.
"""

import triton

DIGIT_BITS = 8
"""Bits of the key that one round finds: 2^8 counters in shared memory."""


@triton.constexpr_function
def classify(elements: int, warps: int, slack: int) -> str:
    """PTX of a tile of elements * warps * 32 keys.

    Operands: `elements` results, `elements` keys, `elements` copies of how many are wanted.
    """
    bins = 1 << DIGIT_BITS
    lane_bins = bins // 32
    keys = [f"${elements + i}" for i in range(elements)]
    lines = [
        "{",
        f".shared .align 16 .b32 counter[{bins}];",
        ".shared .align 16 .b32 extent[128];",
        ".reg .b32 wanted, thread, lane, warp, base, slot, top, bottom, number, shift, bound;",
        ".reg .b32 low, digit, place, total, before, moved, votes, owner, group, need, size;",
        ".reg .b32 above, above_here, next, verdict, step, unused;",
        f".reg .b32 held<{lane_bins}>;",
        ".reg .pred p, q, tied;",
        f"mov.b32 wanted, ${2 * elements};",
        "mov.u32 thread, %tid.x;",
        "and.b32 lane, thread, 31;",
        "shr.u32 warp, thread, 5;",
        "mov.u32 base, counter;",
        # Who read the counters of a call before is done with them.
        "bar.sync 0;",
        *_clear(bins, warps),
        # Largest and smallest key that may be chosen, and how many there are.
        "mov.b32 top, 0;",
        "mov.b32 bottom, -1;",
        "mov.b32 number, 0;",
    ]
    for key in keys:
        lines += [
            f"max.u32 top, top, {key};",
            f"setp.ne.b32 p, {key}, 0;",
            f"@p min.u32 bottom, bottom, {key};",
            "@p add.u32 number, number, 1;",
        ]
    lines += [
        *_across_the_warp(),
        "mov.u32 slot, extent;",
        "mad.lo.u32 place, warp, 16, slot;",
        "setp.eq.u32 p, lane, 0;",
        "@p st.shared.v4.b32 [place], {top, bottom, number, number};",
        "bar.sync 0;",
        "mad.lo.u32 place, lane, 16, slot;",
        "mov.b32 top, 0;",
        "mov.b32 bottom, -1;",
        "mov.b32 number, 0;",
        f"setp.lt.u32 p, lane, {warps};",
        "@p ld.shared.v4.b32 {top, bottom, number, unused}, [place];",
        *_across_the_warp(),
        # The keys lie in [low, low + bound << shift).
        "mov.b32 low, bottom;",
        "mov.b32 need, 0;",
        "setp.le.u32 p, number, wanted;",
        "@p bra.uni FOUND;",
        "sub.u32 size, top, bottom;",
        "clz.b32 shift, size;",
        f"sub.s32 shift, {32 - DIGIT_BITS}, shift;",
        "max.s32 shift, shift, 0;",
        f"mov.b32 bound, {bins};",
        "ROUND:",
    ]
    for key in keys:
        lines += [
            f"sub.u32 digit, {key}, low;",
            "shr.u32 digit, digit, shift;",
            f"setp.ge.u32 p, {key}, low;",
            "setp.lt.and.u32 p, digit, bound, p;",
            "mad.lo.u32 place, digit, 4, base;",
            "@p red.shared.add.u32 [place], 1;",
        ]
    lines += [
        "bar.sync 0;",
        # Every warp adds up all counters, from the highest digit down: lane 0 has the highest.
        "sub.u32 group, 31, lane;",
        f"mad.lo.u32 place, group, {4 * lane_bins}, base;",
    ]
    for first in range(0, lane_bins, 4):
        four = ", ".join(f"held{i}" for i in range(first, first + 4))
        lines.append(f"ld.shared.v4.b32 {{{four}}}, [place+{4 * first}];")
    lines.append("mov.b32 total, held0;")
    lines += [f"add.u32 total, total, held{i};" for i in range(1, lane_bins)]
    lines.append("mov.b32 size, total;")
    for distance in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.up.b32 moved|p, total, {distance}, 0, -1;",
            "@p add.u32 total, total, moved;",
        ]
    lines += [
        "sub.u32 before, total, size;",
        "setp.lt.u32 p, before, wanted;",
        "setp.ge.and.u32 q, total, wanted, p;",
        "vote.sync.ballot.b32 votes, q, -1;",
        "bfind.u32 owner, votes;",
        "mov.b32 above, before;",
        "mov.b32 above_here, 0;",
        "mov.b32 digit, 0;",
        "mov.b32 size, 0;",
    ]
    for i in reversed(range(lane_bins)):
        lines += [
            f"add.u32 next, above, held{i};",
            "setp.lt.u32 p, above, wanted;",
            "setp.ge.and.u32 p, next, wanted, p;",
            f"@p mov.b32 digit, {i};",
            "@p mov.b32 above_here, above;",
            f"@p mov.b32 size, held{i};",
            "mov.b32 above, next;",
        ]
    lines += [
        f"mad.lo.u32 digit, group, {lane_bins}, digit;",
        "shfl.sync.idx.b32 digit, digit, owner, 31, -1;",
        "shfl.sync.idx.b32 above_here, above_here, owner, 31, -1;",
        "shfl.sync.idx.b32 size, size, owner, 31, -1;",
        "sub.u32 wanted, wanted, above_here;",
        "shl.b32 step, digit, shift;",
        "add.u32 low, low, step;",
        # All of this digit are wanted (or few enough too many): nothing more to find.
        f"add.u32 next, wanted, {slack};",
        "setp.le.u32 p, size, next;",
        "@p bra.uni FOUND;",
        # The digit is one key: `wanted` of those that have it.
        "setp.eq.u32 p, shift, 0;",
        "@p mov.b32 need, wanted;",
        "@p bra.uni FOUND;",
        f"sub.s32 step, shift, {DIGIT_BITS};",
        "max.s32 step, step, 0;",
        "sub.u32 bound, shift, step;",
        "mov.b32 shift, step;",
        "mov.b32 step, 1;",
        "shl.b32 bound, step, bound;",
        "bar.sync 0;",
        *_clear(bins, warps),
        "bar.sync 0;",
        "bra.uni ROUND;",
        "FOUND:",
        "setp.ne.u32 tied, need, 0;",
        "shl.b32 need, need, 2;",
    ]
    for i, key in enumerate(keys):
        lines += [
            f"setp.ge.u32 p, {key}, low;",
            "selp.b32 verdict, 1, 0, p;",
            f"setp.eq.and.u32 q, {key}, low, tied;",
            "selp.b32 verdict, 2, verdict, q;",
            f"or.b32 ${i}, verdict, need;",
        ]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def constraints(elements: int) -> str:
    """The operands' registers. A result must not share one with a key that is still needed."""
    return ",".join(["=&r"] * elements + ["r"] * (2 * elements))


@triton.constexpr_function
def _clear(bins: int, warps: int) -> list[str]:
    """Counters to zero, each by one thread."""
    threads = 32 * warps
    lines = ["mad.lo.u32 place, thread, 4, base;"]
    for first in range(0, bins, threads):
        if bins - first < threads:
            lines += [f"setp.lt.u32 p, thread, {bins - first};"]
            lines += [f"@p st.shared.b32 [place+{4 * first}], 0;"]
        else:
            lines += [f"st.shared.b32 [place+{4 * first}], 0;"]
    return lines


@triton.constexpr_function
def _across_the_warp() -> list[str]:
    return [
        "redux.sync.max.u32 top, top, -1;",
        "redux.sync.min.u32 bottom, bottom, -1;",
        "redux.sync.add.u32 number, number, -1;",
    ]
