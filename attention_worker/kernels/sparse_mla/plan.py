"""Which kernel serves a shape, with which blocks, in how many splits. Needs no GPU and no Triton.

What was measured to choose so: docs/performance.md.
"""

import os
from dataclasses import dataclass
from typing import Literal

Form = Literal["portable", "narrow", "wide"]

FORCE_ARCH = "DSA_INDEXER_FORCE_ARCH"
INVARIANT = "VLLM_BATCH_INVARIANT"

_HOPPER = 90
_NATIVE_FP8 = 89
_WIDE_TOKENS = 64
_PORTABLE_TOKENS = 32
_INVARIANT_SPLITS = {"portable": 16, "narrow": 16, "wide": 8}
"""Fixed numbers of splits: enough for one token, not too many for a hundred."""

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


def architecture(capability: tuple[int, int] | None) -> int:
    """The architecture whose kernels run, as 10 * major + minor; no GPU counts as 89.

    `DSA_INDEXER_FORCE_ARCH=80` runs the kernels of SM80 anywhere.
    """
    forced = os.environ.get(FORCE_ARCH)
    if forced:
        return int(forced)
    return _NATIVE_FP8 if capability is None else 10 * capability[0] + capability[1]


def native_fp8(arch: int) -> bool:
    return arch >= _NATIVE_FP8


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
    splits: int | None,
    invariant: bool,
) -> Plan:
    """The plan for a batch; with `invariant` it depends on everything but `tokens`."""
    hopper = arch == _HOPPER and not fp8
    narrow_blocks = -(-heads // 16)
    if not hopper:
        form, block_heads, warps = _portable_blocks(heads)
    elif heads <= 32:
        form, block_heads, warps = "narrow", 16 if heads <= 16 else 32, 4
    elif not invariant and splits is None and tokens * narrow_blocks * 32 <= processors:
        # One token or two: 64 heads in one program would take longer than all else.
        form, block_heads, warps = "narrow", 16, 4
    else:
        form, block_heads, warps = "wide", 64, 8
    block_tokens = _PORTABLE_TOKENS if form == "portable" else _WIDE_TOKENS
    programs = tokens * -(-heads // block_heads)

    buffers = 2
    if splits is None and invariant:
        splits = _INVARIANT_SPLITS[form]
    elif splits is None:
        splits = max(1, processors // max(programs, 1))
        if form == "portable" or (form == "narrow" and _two_a_processor(programs, processors)):
            # Two programs share a multiprocessor, and one's start hides behind the other.
            splits = max(1, 2 * processors // max(programs, 1))
            buffers = 1
    if form == "narrow" and (block_heads > 16 or invariant):
        buffers = 2 if block_heads > 16 else 1
    if form == "portable":
        buffers = 2
    per_split = block_tokens * max(1, -(-k // (min(splits, LONGEST_SPLITS) * block_tokens)))
    return Plan(
        form, block_heads, block_tokens, buffers, warps, max(1, -(-k // per_split)), per_split
    )


def _portable_blocks(heads: int) -> tuple[Form, int, int]:
    if heads <= 16:
        return "portable", 16, 4
    return "portable", 32, 4


def _two_a_processor(programs: int, processors: int) -> bool:
    """Whether one program a multiprocessor would leave too many of them idle, or take turns."""
    return programs > processors or (processors // programs) * programs < 0.8 * processors


def merge_shape(rows: int) -> tuple[int, int]:
    """Columns and warps of the merge's programs for so many rows (tokens times heads)."""
    return (64, 1) if rows <= 64 else (512, 4)
