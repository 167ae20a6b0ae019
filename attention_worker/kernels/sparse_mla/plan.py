"""Which kernel serves a shape, with which blocks, in how many splits. Needs no GPU and no Triton.

What was measured to choose so: docs/performance.md.
"""

import os
from dataclasses import dataclass
from typing import Literal

from indexer_service.kernels.architecture import HOPPER

Form = Literal["portable", "narrow", "wide", "fp8"]

INVARIANT = "VLLM_BATCH_INVARIANT"

_INVARIANT_SPLITS = {"portable": 16, "narrow": 16, "wide": 4, "fp8": 16}
"""Fixed numbers of splits: enough for few tokens, not too many for a hundred."""

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
    invariant: bool
    """Whether nothing may depend on the number of tokens."""


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
    """The plan for a batch; with `invariant` it depends on everything but `tokens`."""
    form, block_heads = _form(tokens, heads, arch, processors, fp8, aligned, invariant)
    block_tokens = 32 if form == "portable" else 64
    programs = max(1, tokens * -(-heads // block_heads))
    # Two programs share a multiprocessor where their shared memory fits: one's start and waits
    # then hide behind the other. A batch that fills the GPU once is faster with one deep program.
    pairs = form == "portable" or (
        form == "narrow" and block_heads == 16 and (invariant or _uneven(programs, processors))
    )
    if splits is None and invariant:
        splits = _INVARIANT_SPLITS[form] if block_heads != 32 else 8
    elif splits is None:
        splits = max(1, (2 if pairs else 1) * processors // programs)
    buffers = 1 if form == "narrow" and pairs else 2
    if form == "portable":
        buffers = 3
    warps = 8 if block_heads > 16 else 4
    per_split = block_tokens * max(1, -(-k // (min(splits, LONGEST_SPLITS) * block_tokens)))
    splits = max(1, -(-k // per_split))
    return Plan(
        form, block_heads, block_tokens, buffers, warps, splits, per_split, invariant
    )  # fmt: skip


def _form(
    tokens: int, heads: int, arch: int, processors: int, fp8: bool, aligned: bool, invariant: bool
) -> tuple[Form, int]:
    """The kernel, and how many heads its programs take."""
    block_heads = 16 if heads <= 16 else 32
    if arch != HOPPER or not aligned:
        # Blocks of 32 heads gather half as often, but were slower: the L2 cache serves the rest.
        return "portable", 16
    if fp8:
        return "fp8", 16
    if heads <= 32:
        return "narrow", block_heads
    if not invariant and tokens * -(-heads // 16) * 8 <= processors:
        # Few tokens: 64 heads in one program would take longer than reading the cache four times.
        return "narrow", 16
    return "wide", 64


def _uneven(programs: int, processors: int) -> bool:
    """Whether one program a multiprocessor would leave many idle, or take turns."""
    return programs > processors or (processors // programs) * programs < 0.8 * processors


def merge_kind(rows: int, splits: int, invariant: bool) -> tuple[int, int, int] | None:
    """How `splits` of so many rows (tokens times heads) are merged, None for one split.

    Splits that a program has room for (a power of two), columns it takes, and its warps. With 512
    columns each of 64 threads has 8 of them (16 bytes) in all splits: no sum crosses threads, but
    for more than 16 splits there are not registers enough.
    """
    if splits == 1:
        return None
    room = 1 << (splits - 1).bit_length()
    few = rows <= 64 and not invariant
    return (room, 64, 1) if few or room > 16 else (room, 512, 2)
