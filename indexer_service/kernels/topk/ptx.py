"""Pieces of PTX that the selection's inline assembly is made of.

Triton has no atomics on shared memory, does not let a program number its elements in order without
sorting them through shared memory first, and turns every scalar result into a reduction over the
program. Together that costs more than selecting. So three device functions are written in PTX,
each beside the Triton code that says the same and that the interpreter runs:
`candidates.find_candidates` (the pivot with the stream past it), `candidates.count_candidates`
(the count of candidates) and `selection.select_from_tile` (the selection from a tile).

Each is executed once by every thread, takes and returns scalars, and may synchronise the program.
"""

import triton

NO_SCORE = "0xff800000"
"""The bits of -inf."""

THREAD = [
    ".reg .b32 thread, lane, warp;",
    "mov.u32 thread, %tid.x;",
    "and.b32 lane, thread, 31;",
    "shr.u32 warp, thread, 5;",
]


@triton.constexpr_function
def registers(name: str, count: int) -> list[str]:
    """name0, name1, ..."""
    return [f"{name}{i}" for i in range(count)]


@triton.constexpr_function
def block(*parts: list[str]) -> str:
    """Assembly text, with the names of labels and registers its own."""
    return "\n".join(["{", *(line for part in parts for line in part), "}"])


@triton.constexpr_function
def scan_lanes(total: str) -> list[str]:
    """total = sum of it over this lane and those before. Uses: moved, p."""
    lines = []
    for distance in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.up.b32 moved|p, {total}, {distance}, 0, -1;",
            f"@p add.u32 {total}, {total}, moved;",
        ]
    return lines


@triton.constexpr_function
def load_four(
    values: list[str], base: str, position: str, first: str, end: str, at: str
) -> list[str]:
    """Scores of four positions; -inf before `first` and from `end` on, which are not read.

    at: the name of a label of its own. Uses: address, inside, outside, next, p.
    """
    lines = [
        f"mad.wide.s32 address, {position}, 4, {base};",
        f"add.s32 next, {position}, 4;",
        f"setp.ge.s32 inside, {position}, {first};",
        f"setp.le.and.s32 inside, next, {end}, inside;",
        *(f"mov.b32 {value}, {NO_SCORE};" for value in values),
        f"@inside ld.global.v4.b32 {{{', '.join(values)}}}, [address];",
        # A row's two ends.
        f"setp.gt.s32 outside, next, {first};",
        f"setp.lt.and.s32 outside, {position}, {end}, outside;",
        "not.pred p, inside;",
        "and.pred outside, outside, p;",
        f"@!outside bra {at};",
    ]
    for i, value in enumerate(values):
        lines += [
            f"add.s32 next, {position}, {i};",
            f"setp.ge.s32 p, next, {first};",
            f"setp.lt.and.s32 p, next, {end}, p;",
            f"@p ld.global.b32 {value}, [address+{4 * i}];",
        ]
    return [*lines, f"{at}:"]


@triton.constexpr_function
def keys(scores: list[str]) -> list[str]:
    """Each score's bits become its key: unsigned, in the order of the scores, 0 for NaN and -inf.

    Uses: flip, p.
    """
    lines = []
    for score in scores:
        lines += [
            f"add.f32 {score}, {score}, 0f00000000;",  # -0.0 is +0.0
            f"setp.ge.f32 p, {score}, 0fff7fffff;",
            f"shr.s32 flip, {score}, 31;",
            "or.b32 flip, flip, 0x80000000;",
            f"xor.b32 {score}, {score}, flip;",
            f"selp.b32 {score}, {score}, 0, p;",
        ]
    return lines


@triton.constexpr_function
def nan_among(scores: list[str]) -> list[str]:
    """NaN in `worst` if it is there already, or if one of the scores is."""
    return [f"max.NaN.f32 worst, worst, {score};" for score in scores]


@triton.constexpr_function
def tell_nan(address: str, mark: str) -> list[str]:
    """At least `mark` is at the address, if a thread has NaN in `worst`. Uses: p."""
    return [
        "setp.nan.f32 p, worst, worst;",
        f"@p red.relaxed.gpu.global.max.s32 [{address}], {mark};",
    ]


@triton.constexpr_function
def sums_before(warps: int) -> list[str]:
    """From one number a warp at [place]: `all` of them, and `prior`, those of warps before."""
    return [
        "mov.b32 all, 0;",
        "mad.lo.u32 next, lane, 4, place;",
        f"setp.lt.u32 p, lane, {warps};",
        "@p ld.shared.b32 all, [next];",
        "setp.lt.u32 p, lane, warp;",
        "selp.b32 prior, all, 0, p;",
        "redux.sync.add.u32 all, all, -1;",
        "redux.sync.add.u32 prior, prior, -1;",
    ]
