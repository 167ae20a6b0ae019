"""PTX of `selection.select_from_tile` and, in `tally`, `candidates.count_candidates`: see there."""

import triton

from indexer_service.kernels.topk import plan
from indexer_service.kernels.topk.ptx import (
    NO_SCORE,
    THREAD,
    block,
    keys,
    load_four,
    nan_among,
    registers,
    scan_lanes,
    tell_nan,
)
from indexer_service.kernels.topk.ptx_search import search, search_storage

_KEPT = 4
"""Vectors of which a thread keeps the indices too; of more, it reads the chosen ones again."""


@triton.constexpr_function
def select(most_scores: int, warps: int, tells_nan: bool) -> str:
    """Operands: = how many; base (address), first, end, k, shift, out (address), counts (address),
    lists, capacity, nan (address), mark; of the last two see `selection.select_from_tile`.

    Without lists, base is where position 0 of a row is. Else it is where the candidates of the
    first list are, and `end` is how many they are together.
    """
    threads = 32 * warps
    most = most_scores // threads // 4
    sizes = [vectors for vectors in (most // 8, most // 4, most // 2, most) if vectors]
    parts = []
    for vectors in sizes:
        name = f"TILE{vectors}"
        if vectors < most:
            parts += [f"setp.gt.s32 p, $3, {vectors * 4 * threads};", f"@p bra.uni {name}_NOT;"]
        parts += [*_tile(vectors, warps, name, tells_nan), "bra.uni END;", f"{name}_NOT:"]
    text: str = block(
        search_storage(),
        THREAD,
        [
            f".shared .align 16 .b32 begins[{plan.MOST_SPLITS}];",
            f".shared .align 16 .b32 table[{max(64, most * warps)}];",
            ".reg .b64 address;",
            f".reg .b32 key<{4 * most}>, index<{4 * _KEPT}>, place<{most}>;",
            f".reg .b32 offset<{most}>, packed<{(most + 3) // 4}>, mine_of<{(most + 3) // 4}>;",
            ".reg .b32 position, origin, bits, ties, number, unfilled, list, two, worst;",
            ".reg .pred inside, outside;",
        ],
        ["setp.ne.s32 p, $8, 0;", "@!p bra.uni LISTED;"],
        _begins(warps),
        ["LISTED:"],
        parts,
        ["END:", "mov.b32 $0, number;"],
    )
    return text


@triton.constexpr_function
def _begins(warps: int) -> list[str]:
    """Where each list begins in the order of all, into `begins`; beyond the lists, the end."""
    lines = ["setp.eq.s32 p, $8, 1;", "@p bra.uni LISTED;", "mov.b32 prior, 0;"]
    for half in (0, 32):
        lines += [
            f"add.u32 place, lane, {half};",
            "setp.lt.s32 p, place, $8;",
            "mov.b32 total, 0;",
            "mad.wide.u32 address, place, 4, $7;",
            "@p ld.global.b32 total, [address];",
            "add.u32 total, total, 3;",
            "and.b32 total, total, -4;",
            "mov.b32 own, total;",
            *scan_lanes("total"),
            "add.u32 total, total, prior;",
            "sub.u32 own, total, own;",
            "mov.u32 next, begins;",
            "mad.lo.u32 next, place, 4, next;",
            "setp.eq.u32 p, warp, 0;",
            "@p st.shared.b32 [next], own;",
            "shfl.sync.idx.b32 prior, total, 31, 31, -1;",
        ]
    return [*lines, "bar.sync 0;"]


@triton.constexpr_function
def _tile(vectors: int, warps: int, name: str, tells_nan: bool) -> list[str]:
    elements = registers("key", 4 * vectors)
    threads = 32 * warps
    lines = ["setp.ne.s32 p, $8, 0;", f"@p bra.uni {name}_LISTS;"]
    for r in range(vectors):
        four = elements[4 * r : 4 * r + 4]
        lines += [
            f"add.u32 position, thread, {r * threads};",
            "shl.b32 position, position, 2;",
            *load_four(four, "$1", "position", "$2", "$3", f"{name}_LOADED{r}"),
        ]
    if tells_nan:  # candidates are none
        first, *rest = elements
        lines += [f"mov.b32 worst, {first};", *nan_among(rest), *tell_nan("$10", "$11")]
    lines += [f"bra.uni {name}_LOADED;", f"{name}_LISTS:"]
    for r in range(vectors):
        lines += _load_candidates(r, threads, name, vectors <= _KEPT)
    lines += [
        f"{name}_LOADED:",
        *keys(elements),
        "mov.b32 wanted, $4;",
        *search(elements, warps, 0, name),
        *_choose(elements, warps, name),
    ]
    lines += ["setp.ne.s32 q, $8, 0;", f"@q bra.uni {name}_PAIRS;"]
    # A row: what stands at a position is its index.
    lines += [
        "shl.b32 origin, thread, 2;",
        "sub.s32 origin, origin, $2;",
        "add.s32 origin, origin, $5;",
    ]
    for r in range(vectors):
        lines.append(f"mad.wide.u32 address, offset{r}, 4, $6;")
        for j in range(4):
            lines += [
                f"and.b32 next, bits, {1 << (4 * r + j)};",
                "setp.ne.b32 p, next, 0;",
                f"add.s32 next, origin, {4 * r * threads + j};",
                "@p st.global.b32 [address], next;",
                "@p add.s64 address, address, 4;",
            ]
    lines += [f"bra.uni {name}_WRITTEN;", f"{name}_PAIRS:"]
    if vectors > _KEPT:
        for r in range(vectors):
            lines += [
                f"mad.wide.u32 address, place{r}, 4, $1;",
                "mad.wide.u32 address, $9, 4, address;",
            ]
            for j in range(4):
                lines += [
                    f"and.b32 next, bits, {1 << (4 * r + j)};",
                    "setp.ne.b32 p, next, 0;",
                    f"@p ld.global.b32 key{4 * r + j}, [address+{4 * j}];",
                ]
    indices = registers("index" if vectors <= _KEPT else "key", 4 * vectors)
    for r in range(vectors):
        lines.append(f"mad.wide.u32 address, offset{r}, 4, $6;")
        for j in range(4):
            lines += [
                f"and.b32 next, bits, {1 << (4 * r + j)};",
                "setp.ne.b32 p, next, 0;",
                f"add.s32 next, {indices[4 * r + j]}, $5;",
                "@p st.global.b32 [address], next;",
                "@p add.s64 address, address, 4;",
            ]
    lines.append(f"{name}_WRITTEN:")
    return [
        *lines,
        "add.u32 unfilled, number, thread;",
        f"{name}_FILL:",
        "setp.ge.s32 p, unfilled, $4;",
        f"@p bra {name}_FILLED;",
        "mad.wide.u32 address, unfilled, 4, $6;",
        "mov.b32 next, -1;",
        "st.global.b32 [address], next;",
        f"add.u32 unfilled, unfilled, {threads};",
        f"bra {name}_FILL;",
        f"{name}_FILLED:",
    ]


@triton.constexpr_function
def _load_candidates(r: int, threads: int, name: str, keep: bool) -> list[str]:
    """The scores of four candidates of one list, and their indices if a thread keeps them."""
    key = registers("key", 4 * r + 4)[4 * r :]
    index = registers("index", 4 * r + 4)[4 * r :]
    index_load = [
        # Set in any case: else the compiler keeps a register for it all the way from the start.
        *(f"mov.b32 {number}, 0;" for number in index),
        "mad.wide.u32 address, $9, 4, address;",
        f"@p ld.global.v4.b32 {{{', '.join(index)}}}, [address];",
    ]
    lines = [
        f"add.u32 position, thread, {r * threads};",
        "shl.b32 position, position, 2;",
        "mov.u32 place, begins;",
        "mov.b32 list, 0;",
    ]
    for step in (32, 16, 8, 4, 2, 1):
        lines += [
            f"setp.le.s32 p, $8, {step};",
            f"@p bra.uni {name}_NEARER{r}_{step};",
            f"add.u32 two, list, {step};",
            "setp.lt.s32 p, two, $8;",
            "mad.lo.u32 next, two, 4, place;",
            "mov.b32 total, 0x7fffffff;",
            "@p ld.shared.b32 total, [next];",
            "setp.le.s32 p, total, position;",
            "@p mov.b32 list, two;",
            f"{name}_NEARER{r}_{step}:",
        ]
    return [
        *lines,
        "mad.lo.u32 next, list, 4, place;",
        "setp.gt.s32 p, $8, 1;",
        "mov.b32 total, 0;",
        "@p ld.shared.b32 total, [next];",
        "sub.u32 total, position, total;",
        "mul.lo.u32 next, list, $9;",
        f"mad.lo.u32 place{r}, next, 2, total;",
        f"mad.wide.u32 address, place{r}, 4, $1;",
        "setp.lt.s32 p, position, $3;",
        *(f"mov.b32 {score}, {NO_SCORE};" for score in key),
        f"@p ld.global.v4.b32 {{{', '.join(key)}}}, [address];",
        *(index_load if keep else []),
    ]


@triton.constexpr_function
def _choose(elements: list[str], warps: int, name: str) -> list[str]:
    """From `search`: which of the thread's elements are chosen (bits), and for each vector of
    four how many chosen ones lie before it (offset<r>); `number`: of the program.

    Elements are in order of vector, then thread, then place in the vector.
    """
    lines = [
        "mov.b32 bits, 0;",
        "mov.b32 ties, 0;",
        "setp.ne.u32 tied, need, 0;",
    ]
    for i, key in enumerate(elements):
        lines += [f"setp.ge.u32 p, {key}, low;", f"@p or.b32 bits, bits, {1 << i};"]
    lines += [f"@!tied bra.uni {name}_COUNT;"]
    for i, key in enumerate(elements):
        lines += [f"setp.eq.u32 p, {key}, low;", f"@p or.b32 ties, ties, {1 << i};"]
    vectors = len(elements) // 4
    lines += [
        # Number the ties first, and keep the first `need` of them.
        "xor.b32 all, bits, ties;",
        "mov.b32 bits, ties;",
        f"{name}_COUNT:",
        *_offsets(vectors, warps, name),
        f"@!tied bra.uni {name}_CHOSEN;",
        "mov.b32 bits, all;",
    ]
    for r in range(vectors):
        for j in range(4):
            lines += [
                f"and.b32 next, ties, {1 << (4 * r + j)};",
                "setp.ne.b32 p, next, 0;",
                f"setp.lt.and.u32 q, offset{r}, need, p;",
                "@q or.b32 bits, bits, next;",
                f"@p add.u32 offset{r}, offset{r}, 1;",
            ]
    return [
        *lines,
        "setp.ne.u32 tied, lane, lane;",
        "bar.sync 0;",
        f"bra.uni {name}_COUNT;",
        f"{name}_CHOSEN:",
    ]


@triton.constexpr_function
def _offsets(vectors: int, warps: int, name: str) -> list[str]:
    """offset<r>: how many bits of all threads come before this thread's vector r."""
    words = (vectors + 3) // 4
    lines = []
    for word in range(words):
        lines.append(f"mov.b32 packed{word}, 0;")
        for r in range(4 * word, min(vectors, 4 * word + 4)):
            lines += [
                f"and.b32 next, bits, {15 << (4 * r)};",
                "popc.b32 next, next;",
                f"shl.b32 next, next, {8 * (r % 4)};",
                f"add.u32 packed{word}, packed{word}, next;",
            ]
        lines += [f"mov.b32 mine_of{word}, packed{word};", *scan_lanes(f"packed{word}")]
    lines += [
        "mov.u32 place, table;",
        "mad.lo.u32 place, warp, 4, place;",
        "setp.eq.u32 q, lane, 31;",
    ]
    for r in range(vectors):
        lines += [
            f"bfe.u32 offset{r}, packed{r // 4}, {8 * (r % 4)}, 8;",
            f"@q st.shared.b32 [place+{4 * warps * r}], offset{r};",
            f"bfe.u32 next, mine_of{r // 4}, {8 * (r % 4)}, 8;",
            f"sub.u32 offset{r}, offset{r}, next;",
        ]
    # The table, by vector and then by warp: 32 or 64 numbers at a time in a warp's lanes.
    entries = vectors * warps
    lines += ["bar.sync 0;", "mov.u32 place, table;", "mov.b32 prior, 0;"]
    for first in range(0, entries, 32):
        lines += [
            f"add.u32 next, lane, {first};",
            f"setp.lt.u32 p, next, {entries};",
            "mad.lo.u32 next, next, 4, place;",
            "mov.b32 total, 0;",
            "@p ld.shared.b32 total, [next];",
            "mov.b32 own, total;",
            *scan_lanes("total"),
            "add.u32 total, total, prior;",
            "sub.u32 own, total, own;",
            "shfl.sync.idx.b32 prior, total, 31, 31, -1;",
        ]
        for r in range(first // warps, min(vectors, (first + 32) // warps)):
            lines += [
                f"add.u32 next, warp, {warps * r - first};",
                "shfl.sync.idx.b32 next, own, next, 31, -1;",
                f"add.u32 offset{r}, offset{r}, next;",
            ]
    return [*lines, "mov.b32 number, prior;"]


@triton.constexpr_function
def tally() -> str:
    """Operands: = (all, places, most); counts (address), lists. Sums and maximum of the counts."""
    lines = []
    for half in (0, 32):
        lines += [
            f"add.u32 list, lane, {half};",
            "setp.lt.s32 p, list, $4;",
            f"mov.b32 count{half}, 0;",
            "mad.wide.u32 address, list, 4, $3;",
            f"@p ld.global.b32 count{half}, [address];",
        ]
    text: str = block(
        THREAD,
        [".reg .b64 address;", ".reg .b32 list, count0, count32, one, two;", ".reg .pred p;"],
        lines,
        [
            "add.u32 one, count0, count32;",
            "redux.sync.add.u32 $0, one, -1;",
            "max.u32 two, count0, count32;",
            "redux.sync.max.u32 $2, two, -1;",
            "add.u32 count0, count0, 3;",
            "and.b32 count0, count0, -4;",
            "add.u32 count32, count32, 3;",
            "and.b32 count32, count32, -4;",
            "add.u32 one, count0, count32;",
            "redux.sync.add.u32 $1, one, -1;",
        ],
    )
    return text
