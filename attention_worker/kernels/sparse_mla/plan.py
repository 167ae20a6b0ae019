"""Which kernel serves a shape, with which blocks, in how many splits. Needs no GPU and no Triton.

What was measured to choose so: docs/performance.md.
"""

import os
from dataclasses import dataclass
from math import gcd
from typing import Literal

from indexer_service.kernels.architecture import HOPPER

Form = Literal["portable", "narrow", "wide", "spread", "fp8"]
"""`wide` and `spread` give the same bits."""

INVARIANT = "VLLM_BATCH_INVARIANT"

_INVARIANT_SPLITS = {16: 16, 32: 8, 64: 4}
"""By block of heads. Fixed numbers of splits: enough for few tokens, not too many for hundreds."""

SPREAD_COLUMNS = 64
"""Columns of the output that a program of the form `spread` has."""

SPREAD_TILES = 2
"""The most blocks of scores a multiprocessor, above which `wide` has programs enough."""

_SPREAD_BUFFERS = 8

LONGEST_SPLITS = 64
WORKSPACE_BYTES = 256 << 20
"""Partial results kept at a time; more tokens than fit are computed in turns."""


@dataclass(frozen=True)
class Plan:
    """How one call is computed."""

    form: Form
    block_heads: int
    block_tokens: int
    """Cache tokens gathered at a time."""
    buffers: int
    """Gathered blocks in shared memory (portable form: pipeline stages)."""
    warps: int
    splits: int
    per_split: int
    """Slots a split, a multiple of block_tokens."""
    per_program: int
    """Splits that a program computes one after the other; their results are those of splits."""
    fold: bool
    """Whether programs, which then have all splits of a token, merge them themselves."""
    invariant: bool
    """Whether a row's bits may not depend on the number of tokens."""


def batch_invariant(asked: bool | None) -> bool:
    """`asked`, or what vLLM's VLLM_BATCH_INVARIANT says."""
    return os.environ.get(INVARIANT, "0") not in ("", "0") if asked is None else asked


def choose(
    tokens: int,
    heads: int,
    k: int,
    *,
    arch: int,
    processors: int,
    fp8: bool,
    aligned: bool,
    splits: int | None,
    invariant: bool,
) -> Plan:
    """The plan for a batch; with `invariant` its splits depend on everything but `tokens`."""
    form, block_heads = _form(tokens, heads, arch, processors, fp8, aligned, invariant)
    block_tokens = 32 if form == "portable" else 64
    programs = max(1, tokens * -(-heads // block_heads))
    # Two programs share a multiprocessor where their shared memory fits: one's start and waits
    # then hide behind the other. A bf16 batch that fills the GPU once is faster with one deep one.
    pairs = form == "portable" or (
        block_heads == 16 and (form == "fp8" or _uneven(programs, processors))
    )
    together = max(1, (2 if pairs else 1) * processors // programs)
    if splits is None:
        splits = together
        if invariant:
            splits = 16 if form == "portable" else _INVARIANT_SPLITS[block_heads]
    warps = 8 if block_heads > 16 else 4
    per_split = block_tokens * max(1, -(-k // (min(splits, LONGEST_SPLITS) * block_tokens)))
    splits = max(1, -(-k // per_split))
    per_program = 1
    if invariant and form != "portable":
        # Splits are fixed, so that they give the same bits; how many programs share them is not.
        per_program = -(-splits // min(splits, together))
        if form == "wide" and programs * -(-k // block_tokens) <= SPREAD_TILES * processors:
            form, per_program = "spread", 1
    fold = 1 < splits == per_program and (form == "narrow" or (form == "fp8" and block_heads == 16))
    buffers = 1 if (form == "fp8" and fold) or (form == "narrow" and pairs) else 2
    if form == "portable":
        buffers = 3
    elif form == "spread":
        buffers = min(_SPREAD_BUFFERS, per_split // block_tokens)
    return Plan(
        form, block_heads, block_tokens, buffers, warps, splits, per_split, per_program, fold,
        invariant,
    )  # fmt: skip


def _form(
    tokens: int, heads: int, arch: int, processors: int, fp8: bool, aligned: bool, invariant: bool
) -> tuple[Form, int]:
    """The kernel, and how many heads its programs take."""
    block_heads = 16 if heads <= 16 else 32
    if arch != HOPPER or not aligned:
        # Blocks of 32 heads gather half as often, but were slower: the L2 cache serves the rest.
        return "portable", 16
    few: Form = "fp8" if fp8 else "narrow"
    if heads <= 32:
        return few, block_heads
    if not invariant and tokens * -(-heads // 16) * 8 <= processors:
        # Few tokens: 64 heads in one program would take longer than reading the cache four times.
        return few, 16
    return "fp8" if fp8 else "wide", 64


def _uneven(programs: int, processors: int) -> bool:
    """Whether one program a multiprocessor would leave many idle, or take turns."""
    return programs > processors or (processors // programs) * programs < 0.8 * processors


def merge_kind(rows: int, splits: int) -> tuple[int, int, int] | None:
    """How `splits` of so many rows (tokens times heads) are merged, None for one split.

    Splits that a program has room for (a power of two), columns it takes, and its warps. With 512
    columns each of 64 threads has 8 of them (16 bytes) in all splits: no sum crosses threads, but
    for more than 16 splits there are not registers enough.
    """
    if splits == 1:
        return None
    room = 1 << (splits - 1).bit_length()
    return (room, 64, 1) if rows <= 64 or room > 16 else (room, 512, 2)


def merge_registers(room: int) -> int:
    """The most a thread of the merge may have: so many that all splits are loaded at once."""
    return 128 if room <= 16 else 255


def turns(plan: Plan, tokens: int, heads: int, processors: int) -> int:
    """How many tokens are computed at a time, so that partial results stay small.

    Turns are alike, and their programs fill the GPU a whole number of times, where that can be.
    """
    if plan.splits == 1 or plan.fold:
        return tokens
    most = max(1, WORKSPACE_BYTES // (plan.splits * heads * (2 * 512 + 4)))
    programs = -(-plan.splits // plan.per_program) * -(-heads // plan.block_heads)
    turn = -(-tokens // -(-tokens // most))
    full = processors // gcd(processors, programs)
    return min(most, -(-turn // full) * full)
