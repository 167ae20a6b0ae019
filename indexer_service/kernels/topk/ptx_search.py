"""PTX that finds the k-th largest of the keys that a program's threads hold.

A digit of 11 bits a round, by a histogram in shared memory; once a digit has few keys, they are
compared with each other.
"""

import triton

from indexer_service.kernels.topk.ptx import registers, scan_lanes, sums_before

DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
"""Counters of a histogram over one digit of the keys."""

FEW = 32
"""So many keys of a digit are told apart by one warp."""


@triton.constexpr_function
def search_storage() -> list[str]:
    """What `search` needs declared."""
    return [
        f".shared .align 16 .b32 bins[{BINS}];",
        ".shared .align 16 .b32 tally[4];",
        ".shared .align 16 .b32 extent[64];",
        ".shared .align 16 .b32 sums[32];",
        ".shared .align 16 .b32 found[4];",
        f".shared .align 16 .b32 few[{FEW}];",
        ".reg .b32 low, wanted, need, top, bottom, shift, bound, digit, place, total, own, before;",
        ".reg .b32 all, prior, above, size, group, step, at_bins, at_few, one, votes, flip;",
        ".reg .b32 moved, next, complete;",
        ".reg .b32 held<16>;",
        ".reg .pred p, q, mine, tied;",
    ]


@triton.constexpr_function
def search(elements: list[str], warps: int, slack: int, name: str) -> list[str]:
    """Find the `wanted`-th largest of the program's keys.

    Afterwards all keys >= low are wanted, if need is 0 (up to `slack` more than wanted); else
    those above low, and `need` of the keys that equal low. low >= 1. name: of labels.
    """
    threads = 32 * warps
    share = BINS // threads
    held = registers("held", share)
    lines = [
        "mov.u32 at_bins, bins;",
        "mov.u32 at_few, few;",
        "mov.b32 need, 0;",
        "mov.b32 complete, 1;",
        "bar.sync 0;",  # whoever read the counters of a call before is done with them
        *_clear(threads),
        # The extent of the keys above 0: `bottom` is one less, so that 0 is out of its way.
        "mov.b32 top, 0;",
        "mov.b32 bottom, -1;",
    ]
    for key in elements:
        lines += [
            f"max.u32 top, top, {key};",
            f"add.u32 next, {key}, -1;",
            "min.u32 bottom, bottom, next;",
        ]
    lines += [
        "redux.sync.max.u32 top, top, -1;",
        "redux.sync.min.u32 bottom, bottom, -1;",
        "mov.u32 place, extent;",
        "mad.lo.u32 next, warp, 8, place;",
        "setp.eq.u32 p, lane, 0;",
        "@p st.shared.v2.b32 [next], {top, bottom};",
        "bar.sync 0;",
        "mad.lo.u32 next, lane, 8, place;",
        f"setp.lt.u32 p, lane, {warps};",
        "@p ld.shared.v2.b32 {top, bottom}, [next];",
        "redux.sync.max.u32 top, top, -1;",
        "redux.sync.min.u32 bottom, bottom, -1;",
        "add.u32 low, bottom, 1;",
        "setp.eq.u32 p, top, 0;",
        "@p mov.b32 low, 1;",
        f"@p bra.uni {name}_FOUND;",
        # Keys in question are low + (0, ..., (bound << shift) - 1). A key below wraps around to
        # beyond that: the largest key there is lies 2^23 below 2^32.
        "sub.u32 size, top, low;",
        "clz.b32 shift, size;",
        f"sub.s32 shift, {32 - DIGIT_BITS}, shift;",
        "max.s32 shift, shift, 0;",
        "shr.u32 bound, size, shift;",
        "add.u32 bound, bound, 1;",
        f"{name}_ROUND:",
    ]
    for key in elements:
        lines += [
            f"sub.u32 digit, {key}, low;",
            "shr.u32 digit, digit, shift;",
            "setp.lt.u32 p, digit, bound;",
            "mad.lo.u32 place, digit, 4, at_bins;",
            "@p red.shared.add.u32 [place], 1;",
        ]
    lines += [
        "bar.sync 0;",
        # Add up the counters from the highest digit down; thread 0 has the highest.
        f"sub.u32 group, {threads - 1}, thread;",
        f"mad.lo.u32 place, group, {4 * share}, at_bins;",
    ]
    width = min(share, 4)
    for first in range(0, share, width):
        some = ", ".join(held[first : first + width])
        vector, some = (f".v{width}", f"{{{some}}}") if width > 1 else ("", some)
        lines.append(f"ld.shared{vector}.b32 {some}, [place+{4 * first}];")
    lines.append(f"mov.b32 own, {held[0]};")
    lines += [f"add.u32 own, own, {more};" for more in held[1:]]
    lines += [
        "mov.b32 total, own;",
        *scan_lanes("total"),
        "mov.u32 place, sums;",
        "mad.lo.u32 next, warp, 4, place;",
        "setp.eq.u32 p, lane, 31;",
        "@p st.shared.b32 [next], total;",
        "bar.sync 0;",
        *sums_before(warps),
        # No more than wanted: all of them.
        f"add.u32 next, wanted, {slack};",
        "setp.le.u32 p, all, next;",
        f"@p bra.uni {name}_FOUND;",
        "mov.b32 complete, 0;",
        "add.u32 before, prior, total;",
        "sub.u32 before, before, own;",
        "add.u32 next, before, own;",
        "setp.lt.u32 mine, before, wanted;",
        "setp.ge.and.u32 mine, next, wanted, mine;",
        f"@!mine bra {name}_OTHERS;",
        "mov.b32 above, before;",
    ]
    for i in reversed(range(share)):
        lines += [
            f"add.u32 next, above, {held[i]};",
            "setp.lt.u32 p, above, wanted;",
            "setp.ge.and.u32 p, next, wanted, p;",
            f"@p mov.b32 digit, {i};",
            "@p mov.b32 before, above;",
            f"@p mov.b32 size, {held[i]};",
            "mov.b32 above, next;",
        ]
    lines += [
        f"mad.lo.u32 digit, group, {share}, digit;",
        "mov.u32 place, found;",
        "st.shared.v4.b32 [place], {digit, before, size, size};",
        f"{name}_OTHERS:",
        "bar.sync 0;",
        "mov.u32 place, found;",
        "ld.shared.v4.b32 {digit, above, size, next}, [place];",
        "sub.u32 wanted, wanted, above;",
        "shl.b32 step, digit, shift;",
        "add.u32 low, low, step;",
        # All of this digit are wanted (or few enough too many): nothing more to find.
        f"add.u32 next, wanted, {slack};",
        "setp.le.u32 p, size, next;",
        f"@p bra.uni {name}_FOUND;",
        # The digit is one key: `wanted` of those that have it.
        "setp.eq.u32 p, shift, 0;",
        "@p mov.b32 need, wanted;",
        f"@p bra.uni {name}_FOUND;",
        f"setp.le.u32 p, size, {FEW};",
        f"@p bra.uni {name}_FEW;",
        f"sub.s32 step, shift, {DIGIT_BITS};",
        "max.s32 step, step, 0;",
        "sub.u32 bound, shift, step;",
        "mov.b32 shift, step;",
        "mov.b32 step, 1;",
        "shl.b32 bound, step, bound;",
        *_clear(threads),
        "bar.sync 0;",
        f"bra.uni {name}_ROUND;",
        # Collect the digit's few keys; every warp ranks them by itself.
        f"{name}_FEW:",
        "mov.b32 votes, 0;",
    ]
    for i, key in enumerate(elements):
        lines += [
            f"sub.u32 digit, {key}, low;",
            "shr.u32 digit, digit, shift;",
            "setp.eq.u32 p, digit, 0;",
            f"@p or.b32 votes, votes, {1 << i};",
        ]
    lines += [
        "setp.eq.u32 p, votes, 0;",
        f"@p bra {name}_NONE;",
        "popc.b32 next, votes;",
        "mov.u32 place, tally;",
        "atom.shared.add.u32 next, [place], next;",
        "mad.lo.u32 place, next, 4, at_few;",
    ]
    for i, key in enumerate(elements):
        lines += [
            f"and.b32 next, votes, {1 << i};",
            "setp.ne.b32 p, next, 0;",
            f"@p st.shared.b32 [place], {key};",
            "@p add.u32 place, place, 4;",
        ]
    lines += [
        f"{name}_NONE:",
        "bar.sync 0;",
        "mad.lo.u32 place, lane, 4, at_few;",
        "ld.shared.b32 one, [place];",
        "mov.b32 above, 0;",
        "mov.b32 total, 0;",
        "mov.b32 step, 0;",
        f"{name}_RANK:",
        "mad.lo.u32 place, step, 4, at_few;",
        "ld.shared.v4.b32 {held0, held1, held2, held3}, [place];",
    ]
    for other in registers("held", 4):
        lines += [
            f"setp.gt.u32 p, {other}, one;",
            "@p add.u32 above, above, 1;",
            f"setp.ge.u32 p, {other}, one;",
            "@p add.u32 total, total, 1;",
        ]
    lines += [
        "add.u32 step, step, 4;",
        "setp.lt.u32 p, step, size;",
        f"@p bra.uni {name}_RANK;",
        "setp.lt.u32 p, above, wanted;",
        "setp.ge.and.u32 p, total, wanted, p;",
        "vote.sync.ballot.b32 votes, p, -1;",
        "bfind.u32 votes, votes;",
        "shfl.sync.idx.b32 low, one, votes, 31, -1;",
        "shfl.sync.idx.b32 above, above, votes, 31, -1;",
        "shfl.sync.idx.b32 total, total, votes, 31, -1;",
        "sub.u32 above, wanted, above;",
        "setp.gt.u32 p, total, wanted;",
        "@p mov.b32 need, above;",
        f"{name}_FOUND:",
    ]
    return lines


@triton.constexpr_function
def _clear(threads: int) -> list[str]:
    """Counters to zero. Uses: place, step."""
    lines = ["mov.b32 step, 0;", "mad.lo.u32 place, thread, 16, at_bins;"]
    for first in range(0, BINS, 4 * threads):
        if BINS - first < 4 * threads:
            lines.append(f"setp.lt.u32 p, thread, {(BINS - first) // 4};")
        guard = "@p " if BINS - first < 4 * threads else ""
        lines.append(f"{guard}st.shared.v4.b32 [place+{4 * first}], {{step, step, step, step}};")
    return [
        *lines,
        "mov.u32 place, tally;",
        "st.shared.b32 [place], step;",
        f"setp.lt.u32 p, thread, {FEW};",
        "mad.lo.u32 place, thread, 4, at_few;",
        "@p st.shared.b32 [place], step;",
    ]
