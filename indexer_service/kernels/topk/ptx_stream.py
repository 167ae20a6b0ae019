"""PTX of `candidates.find_candidates`: see there.

While a row is streamed, a score costs one comparison and one vote: the votes make a bitmap of
what reaches the pivot in shared memory. Only then are the few bits that are set listed in order.
"""

import triton

from indexer_service.kernels.topk.ptx import (
    NO_SCORE,
    THREAD,
    block,
    keys,
    nan_among,
    registers,
    scan_lanes,
    sums_before,
    tell_nan,
)
from indexer_service.kernels.topk.ptx_search import search, search_storage

WINDOW = 1 << 16
"""Positions of a bitmap; it takes the place of the counters of `search`."""

_LOADS = 16
"""Scores that a thread takes in a step."""

_BUFFERS = ("east", "south", "west", "north")
"""Registers of as many steps: one is voted on while the others are under way. A window has a
multiple of as many steps.
"""

_BEFORE = 3
"""Steps under way while the pivot is found, which needs registers too."""

_GATHERED = 8
"""Candidates that a thread looks up at a time."""


@triton.constexpr_function
def candidates(sample: int, warps: int, slack: int, capacity: int, tells_nan: bool) -> str:
    """Operands: = how many, = pivot (bits); base (address), at, until, first, kept (address),
    groups, stride, rank, nan (address), mark; of the last two see `find_candidates`. A list holds
    4 * groups candidates, which is at most `capacity`.
    """
    threads = 32 * warps
    keyed = registers("key", sample // threads)
    text: str = block(
        search_storage(),
        THREAD,
        [
            f".shared .align 16 .b16 list[{capacity}];",
            ".reg .b64 address, from;",
            f".reg .b32 key<{len(keyed)}>, {', '.join(f'{name}<{_LOADS}>' for name in _BUFFERS)};",
            f".reg .b32 spot<{_GATHERED}>, score<{_GATHERED}>;",
            ".reg .b32 hash, pivot, count, window, limit, until, ahead, at_map, at_list;",
            ".reg .b32 word0, word1, word2, word3, set, bit, unit, begin, units, last, slot, room;",
            ".reg .b32 worst;",
            f".reg .pred inside, outside, one_lane, there<{_GATHERED}>;",
        ],
        # The pivot waits for its sample. Behind that, the first scores are on their way meanwhile.
        _sample(keyed, threads),
        [
            f"mad.lo.u32 ahead, warp, {32 * _LOADS}, lane;",
            "add.s32 ahead, ahead, $3;",
            "mov.b32 until, $4;",
        ],
        *(_load(name, f"HEAD_{name}", warps) for name in _BUFFERS[:_BEFORE]),
        keys(keyed),
        ["mov.b32 wanted, $9;"],
        search(keyed, warps, slack, "SAMPLE"),
        *(_load(name, f"HEAD_{name}", warps) for name in _BUFFERS[_BEFORE:-1]),
        [
            # The score of the key, or the lowest of all if the whole sample is wanted.
            "setp.ge.u32 p, low, 0x80000000;",
            "selp.b32 flip, 0x80000000, 0xffffffff, p;",
            "xor.b32 pivot, low, flip;",
            "setp.ne.u32 p, complete, 0;",
            "@p mov.b32 pivot, 0xff7fffff;",
            "mov.b32 count, 0;",
            "mov.b32 window, $3;",
            "shl.b32 room, $7, 2;",
            "setp.eq.u32 one_lane, lane, 0;",
            "mov.u32 at_list, list;",
            *(["mov.b32 worst, 0;"] if tells_nan else []),
            "WINDOW:",
            f"add.s32 last, window, {WINDOW};",
            "min.s32 last, last, until;",
            f"mad.lo.u32 at_map, warp, {4 * _LOADS}, at_bins;",
            "mov.b32 limit, window;",
            "bar.sync 0;",  # the counters, or the bitmap before, are not needed any more
            "STEP:",
        ],
        *(_step(i, warps, tells_nan) for i in range(len(_BUFFERS))),
        ["bra.uni STEP;", "LISTED:"],
        _list(warps),
        _gather(threads),
        [
            "FULL:",
            "add.u32 count, count, all;",
            f"add.s32 window, window, {WINDOW};",
            "setp.lt.s32 p, window, until;",
            "@p bra.uni WINDOW;",
            # Fill up to a whole group with scores that are never chosen.
            "add.u32 next, count, 3;",
            "and.b32 next, next, -4;",
            "add.u32 own, count, thread;",
            "setp.lt.u32 p, own, next;",
            "setp.le.and.u32 p, next, room, p;",
            "mad.wide.u32 address, own, 4, $6;",
            f"mov.b32 next, {NO_SCORE};",
            "@p st.global.b32 [address], next;",
            "mov.b32 $0, count;",
            "mov.b32 $1, pivot;",
        ],
        tell_nan("$10", "$11") if tells_nan else [],
    )
    return text


@triton.constexpr_function
def _load(name: str, label: str, warps: int) -> list[str]:
    """The scores of a step: the thread's `lane` of 16 times 32 positions from `ahead` on.

    -inf before the row's first and from `until` on, where nothing is read. Steps beyond are never
    looked at. Moves `ahead` to the next step.
    """
    scores = registers(name, _LOADS)
    lines = [
        "mad.wide.s32 address, ahead, 4, $2;",
        # All of the warp's are inside, or each is looked at.
        "sub.s32 next, ahead, lane;",
        "setp.ge.s32 p, next, until;",
        f"@p bra.uni {label}_BEYOND;",
        "setp.ge.s32 p, next, $5;",
        f"add.s32 next, next, {32 * _LOADS};",
        "setp.le.and.s32 p, next, until, p;",
        f"@!p bra.uni {label}_EDGE;",
        *(f"ld.global.b32 {score}, [address+{128 * i}];" for i, score in enumerate(scores)),
        f"bra.uni {label}_LOADED;",
        f"{label}_EDGE:",
    ]
    for i, score in enumerate(scores):
        lines += [
            f"add.s32 next, ahead, {32 * i};",
            "setp.ge.s32 p, next, $5;",
            "setp.lt.and.s32 p, next, until, p;",
            f"mov.b32 {score}, {NO_SCORE};",
            f"@p ld.global.b32 {score}, [address+{128 * i}];",
        ]
    return [
        *lines,
        f"bra.uni {label}_LOADED;",
        f"{label}_BEYOND:",
        *(f"mov.b32 {score}, {NO_SCORE};" for score in scores),
        f"{label}_LOADED:",
        f"add.s32 ahead, ahead, {32 * _LOADS * warps};",
    ]


@triton.constexpr_function
def _sample(scores: list[str], threads: int) -> list[str]:
    """Four scores next to each other (they come together) of each of equal parts of the row, at
    a place that no period can follow.
    """
    lines = ["mad.wide.s32 from, $5, 4, $2;", "sub.u32 bit, $8, 3;"]
    for i, score in enumerate(scores):
        lines += [
            f"add.u32 next, thread, {i * threads};",
            "shr.u32 place, next, 2;",
            "mul.lo.u32 hash, place, 2654435761;",
            "mul.hi.u32 hash, hash, bit;",
            "mad.lo.u32 place, place, $8, hash;",
            "and.b32 place, place, -4;",
            "and.b32 next, next, 3;",
            "add.u32 place, place, next;",
            "mad.wide.u32 address, place, 4, from;",
            f"ld.global.b32 {score}, [address];",
        ]
    return lines


@triton.constexpr_function
def _step(buffer: int, warps: int, tells_nan: bool) -> list[str]:
    """Votes of the scores in a buffer, after those of some steps on have been asked for."""
    step = 32 * _LOADS * warps
    now, free = _BUFFERS[buffer], _BUFFERS[buffer - 1]
    lines = [
        "setp.ge.s32 p, limit, last;",
        "@p bra.uni LISTED;",
        f"add.s32 limit, limit, {step};",
        *_load(free, f"LOAD_{free}", warps),
        *(nan_among(registers(now, _LOADS)) if tells_nan else []),
    ]
    for i in range(_LOADS):
        lines += [
            f"setp.ge.f32 p, {now}{i}, pivot;",
            f"vote.sync.ballot.b32 word{i % 4}, p, -1;",
        ]
        if i % 4 == 3:
            words = "{word0, word1, word2, word3}"
            lines.append(f"@one_lane st.shared.v4.b32 [at_map+{4 * i - 12}], {words};")
    return [*lines, f"add.u32 at_map, at_map, {step // 8};"]


@triton.constexpr_function
def _list(warps: int) -> list[str]:
    """The positions whose bit is set, in order, into the list; `all`: how many.

    Each thread takes a power of two of words next to each other.
    """
    threads = 32 * warps
    return [
        "bar.sync 0;",
        "sub.s32 units, last, window;",
        "add.s32 units, units, 31;",
        "shr.u32 units, units, 5;",
        f"add.u32 next, units, {threads - 1};",
        f"shr.u32 next, next, {threads.bit_length() - 1};",
        "sub.u32 next, next, 1;",
        "clz.b32 next, next;",
        "sub.u32 next, 32, next;",
        "shl.b32 unit, 1, next;",
        "shl.b32 begin, thread, next;",
        # Count them, in an order in which the lanes' words lie in different banks.
        "shr.u32 bit, lane, 2;",
        "sub.u32 set, unit, 1;",
        "and.b32 bit, bit, set;",
        "mov.b32 own, 0;",
        "COUNT:",
        "xor.b32 next, set, bit;",
        "add.u32 next, next, begin;",
        "setp.lt.u32 p, next, units;",
        "mad.lo.u32 place, next, 4, at_bins;",
        "mov.b32 hash, 0;",
        "@p ld.shared.b32 hash, [place];",
        "popc.b32 hash, hash;",
        "add.u32 own, own, hash;",
        "sub.s32 set, set, 1;",
        "setp.ge.s32 p, set, 0;",
        "@p bra.uni COUNT;",
        "add.u32 next, begin, unit;",
        "min.u32 units, units, next;",
        "mov.b32 total, own;",
        *scan_lanes("total"),
        "mov.u32 place, sums;",
        "mad.lo.u32 next, warp, 4, place;",
        "setp.eq.u32 p, lane, 31;",
        "@p st.shared.b32 [next], total;",
        "bar.sync 0;",
        *sums_before(warps),
        # Beyond the room nothing is kept: the row is read again anyway.
        "add.u32 next, count, all;",
        "setp.gt.u32 p, next, room;",
        "@p bra.uni FULL;",
        "add.u32 slot, prior, total;",
        "sub.u32 slot, slot, own;",
        "mad.lo.u32 slot, slot, 2, at_list;",
        "mad.lo.u32 unit, begin, 4, at_bins;",
        "mov.b32 set, 0;",
        # A bit a turn, and a word when it has no more.
        "NOTE:",
        "setp.eq.u32 p, set, 0;",
        "setp.lt.and.u32 p, begin, units, p;",
        "@p ld.shared.b32 set, [unit];",
        "@p shl.b32 hash, begin, 5;",
        "@p add.u32 begin, begin, 1;",
        "@p add.u32 unit, unit, 4;",
        "setp.ne.u32 q, set, 0;",
        "neg.s32 bit, set;",
        "and.b32 bit, bit, set;",
        "xor.b32 set, set, bit;",
        "bfind.u32 place, bit;",
        "add.u32 place, place, hash;",
        "@q st.shared.u16 [slot], place;",
        "@q add.u32 slot, slot, 2;",
        "setp.ne.u32 p, set, 0;",
        "setp.lt.or.u32 p, begin, units, p;",
        "@p bra NOTE;",
    ]


@triton.constexpr_function
def _gather(threads: int) -> list[str]:
    """Scores and indices of the listed positions, behind those that are kept already."""
    some = range(_GATHERED)
    lines = ["bar.sync 0;", "mov.b32 slot, thread;", "GATHER:", "setp.ge.u32 p, slot, all;"]
    lines += ["@p bra GATHERED;"]
    for i in some:
        lines += [
            f"add.u32 next, slot, {i * threads};",
            f"setp.lt.u32 there{i}, next, all;",
            "mad.lo.u32 next, next, 2, at_list;",
            f"mov.b32 spot{i}, 0;",
            f"mov.b32 score{i}, 0;",
            f"@there{i} ld.shared.u16 spot{i}, [next];",
        ]
    for i in some:
        lines += [
            f"add.u32 spot{i}, spot{i}, window;",
            f"mad.wide.s32 address, spot{i}, 4, $2;",
            f"@there{i} ld.global.b32 score{i}, [address];",
        ]
    lines += [
        "add.u32 next, slot, count;",
        "mad.wide.u32 address, next, 4, $6;",
        "mad.wide.u32 from, room, 4, address;",
    ]
    for i in some:
        lines += [
            f"sub.s32 spot{i}, spot{i}, $5;",
            f"@there{i} st.global.b32 [address+{4 * i * threads}], score{i};",
            f"@there{i} st.global.b32 [from+{4 * i * threads}], spot{i};",
        ]
    lines += [f"add.u32 slot, slot, {_GATHERED * threads};", "bra GATHER;", "GATHERED:"]
    return lines
