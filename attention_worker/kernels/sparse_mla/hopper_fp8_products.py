"""The two products of the fp8 kernel for SM90, both with codes as they are cached.

The other factors are each split into two e4m3 numbers that together have bf16's eight bits or more:
a first one, and what it leaves out. Scores read codes where they lie in shared memory. The output
needs them transposed: they pass through registers, where bytes are only moved.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention_worker.kernels.sparse_mla.hopper_fp8_layouts import (
    everywhere,
    groups,
    output_layout,
    scores_layout,
    transposed,
)

_TRANSPOSE = gl.constexpr("""
prmt.b32 $0, $2, $3, 0x6240;
prmt.b32 $1, $2, $3, 0x7351;
""")
"""Pairs of codes of tokens n, n + 1; n + 8, n + 9 -> their first, their second codes, in the order
n, n + 8, n + 1, n + 9."""

_PACK = gl.constexpr("""
{
.reg .b16 x, y;
cvt.rn.satfinite.e4m3x2.f32 x, $3, $1;
cvt.rn.satfinite.e4m3x2.f32 y, $4, $2;
mov.b32 $0, {x, y};
}
""")
"""Two heads' weights of token n; of token n + 8 -> a head's two as codes, side by side."""


@gluon.jit
def _load_values(codes, WARPS: gl.constexpr):
    """Pairs of codes [64 tokens, 64], int16 -> pieces [8 * WARPS pairs, 64 tokens]."""
    pairs = codes.permute((1, 0)).load(transposed(WARPS))
    if WARPS == 4:  # noqa: SIM108 (a constant condition)
        pieces = gl.split(pairs.reshape([2, 32, 64]).permute((1, 2, 0)))
    else:
        pieces = (pairs,)
    return pieces


@gluon.jit
def _values(pairs, LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """A piece of `_load_values` -> e4m3 [16 * WARPS columns, 64 tokens], the first operand.

    Tokens are ordered as `store_weights` stores them, columns as threads have them: `_columns`
    brings the output into their own order.
    """
    first, second = gl.inline_asm_elementwise(
        _TRANSPOSE, "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    codes = gl.join(first, second).reshape([WARPS, 8, 4, 2, 4, 2, 2])
    codes = codes.permute((0, 6, 1, 2, 4, 3, 5)).reshape([16 * WARPS, 64])
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    codes = gl.convert_layout(codes, operand, assert_trivial=True)
    return codes.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def load_split_query(
    latent, token, head_block, heads, token_stride, head_stride, shared, head_scales,
    BLOCK_H: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Latent part to shared memory [2 * BLOCK_H, 512]: e4m3, and 16 times what that left out.

    A warpgroup's heads stand together, with both their parts. A head's values are multiplied by a
    power of two that brings the largest into [128, 256); what then is too small for e4m3 is nothing
    beside it. By what to multiply scores for that goes to head_scales.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [WARPS, 1], [1, 0])
    SHARE: gl.constexpr = BLOCK_H // groups(WARPS)
    column = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))[None, :]
    row = latent + gl.multiple_of(token * token_stride, 8)
    for begin in gl.static_range(0, BLOCK_H, 16):
        head = head_block * BLOCK_H + begin + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        at = row + gl.multiple_of(head.to(gl.int64) * head_stride, 8)[:, None]
        q = gl.load(at + column, mask=(head < heads)[:, None], other=0.0).to(gl.float32)
        largest = gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) & 0x7F800000
        exponent = gl.minimum(gl.maximum(largest, 8 << 23), 253 << 23)
        q = q * ((134 << 23) - exponent + (127 << 23)).to(gl.float32, bitcast=True)[:, None]
        first = q.to(gl.float8e4nv)
        shared.slice(begin // SHARE * SHARE + begin, 16, 0).store(first)
        rest = (q - first.to(gl.float32)) * 16.0
        shared.slice(begin // SHARE * SHARE + begin + SHARE, 16, 0).store(rest.to(gl.float8e4nv))
        head_scales.slice(begin, 16, 0).store((exponent - (7 << 23)).to(gl.float32, bitcast=True))


@gluon.jit
def group_scale(scales, group, LAYOUT: gl.constexpr):
    """[64 tokens, 1] fp32."""
    return scales.slice(group, 1, 1).load(LAYOUT).to(gl.float32, bitcast=True)


@gluon.jit
def largest_scale(scales, WARPS: gl.constexpr):
    """The largest of a block's scales, and nothing smaller than 2^-100."""
    values = scales.load(everywhere(WARPS)).to(gl.float32, bitcast=True)
    return gl.maximum(gl.max(gl.max(values, 1), 0), 2.0**-100)


@gluon.jit
def score_block(
    block, k_rope, scales, q, q_rope, head_scale, BLOCK_H: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """A block's products with queries [64 tokens, BLOCK_H]."""
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PARTS: gl.constexpr = scores_layout(2 * BLOCK_H, WARPS, 32)
    SCORES: gl.constexpr = scores_layout(BLOCK_H, WARPS)
    # Groups under way at a time: as many as there are registers for.
    AHEAD: gl.constexpr = 2 // groups(WARPS)
    nothing = gl.zeros([64, 2 * BLOCK_H], gl.float32, PARTS)
    codes = block._reinterpret(gl.float8e4nv, [64, 512], CODES)
    scores = gl.zeros([64, BLOCK_H], gl.float32, SCORES)
    parts = ()
    for step in gl.static_range(3 + AHEAD):
        if step < 4:
            keys = codes.slice(128 * step, 128, 1)
            queries = q.slice(128 * step, 128, 1).permute((1, 0))
            part = warpgroup_mma(keys, queries, nothing, use_acc=False, is_async=True)
            parts += (part,)  # type: ignore[assignment]
        if step + 1 >= AHEAD:
            part = warpgroup_mma_wait(
                min(step, 3) - (step + 1 - AHEAD), deps=[parts[step + 1 - AHEAD]]
            )
            halves = part.reshape([64, groups(WARPS), 2, BLOCK_H // groups(WARPS)])
            first, rest = gl.split(halves.permute((0, 1, 3, 2)))
            whole = (first + rest * 0.0625).reshape([64, BLOCK_H])
            whole = gl.convert_layout(whole, SCORES, assert_trivial=True)
            scores += whole * group_scale(scales, step + 1 - AHEAD, SCORES)
    scores = scores * head_scale
    scores = warpgroup_mma(k_rope, q_rope.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def halves(tile, BLOCK_H: gl.constexpr):
    """[64 tokens, BLOCK_H] -> tokens n and tokens n + 8 of every 16, which a thread has both."""
    low, high = gl.split(tile.reshape([4, 2, 8, BLOCK_H]).permute((0, 2, 3, 1)))
    return low.reshape([32, BLOCK_H]), high.reshape([32, BLOCK_H])


@gluon.jit
def _pack(weights, shared, BLOCK_H: gl.constexpr):
    """fp32 [64 tokens, BLOCK_H] -> e4m3 in shared memory, int16 [BLOCK_H, 32 pairs of tokens]."""
    low, high = halves(weights, BLOCK_H)
    codes = gl.inline_asm_elementwise(
        _PACK, "=r,f,f,f,f", [low, high], dtype=gl.int16, is_pure=True, pack=2
    )
    shared.permute((1, 0)).store(codes)


@gluon.jit
def store_weights(weights, shared, group, BLOCK_H: gl.constexpr):
    """Weights below 449 as four bits each, then as the next four."""
    first = (weights.to(gl.int32, bitcast=True) & -0x100000).to(gl.float32, bitcast=True)
    _pack(first, shared.index(2 * group), BLOCK_H)
    _pack(weights - first, shared.index(2 * group + 1), BLOCK_H)


@gluon.jit
def add_output(
    block, weights, zero, acc, rescale, rescales, unit, free, BLOCK_H: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Add a block's output, piece after piece; the block's buffer is free then."""
    OUTPUT: gl.constexpr = output_layout(BLOCK_H, WARPS)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    A_GROUP: gl.constexpr = 8 // WARPS
    nothing = gl.zeros([16 * WARPS, BLOCK_H], gl.float32, OUTPUT)
    added = ()
    before = nothing
    for group in gl.static_range(4):
        pieces = _load_values(block.slice(64 * group, 64, 1), WARPS)
        if group == 3:
            # All of the buffer is in registers.
            gl.thread_barrier()
            mbarrier.arrive(free, count=1)
        first = weights.index(zero + 2 * group)._reinterpret(gl.float8e4nv, [BLOCK_H, 64], WEIGHTS)
        rest = weights.index(zero + 2 * group + 1)._reinterpret(
            gl.float8e4nv, [BLOCK_H, 64], WEIGHTS
        )
        for piece in gl.static_range(A_GROUP):
            values = _values(pieces[piece], OUTPUT, WARPS)
            if WARPS == 8:
                kept = acc[group] * rescales.load(gl.SliceLayout(0, OUTPUT))[None, :]
            output = warpgroup_mma(
                values, first.permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            output = warpgroup_mma(values, rest.permute((1, 0)), output, is_async=True)
            if WARPS == 8:  # no registers for two
                output, kept = warpgroup_mma_wait(0, deps=[output, kept])
                added += (gl.fma(output, unit, kept),)  # type: ignore[assignment]
            elif group + piece > 0:
                done = warpgroup_mma_wait(2, deps=[before])
                kept = acc[A_GROUP * group + piece - 1] * rescale
                added += (gl.fma(done, unit, kept),)  # type: ignore[assignment]
            before = output
    if WARPS == 4:
        done = warpgroup_mma_wait(0, deps=[before])
        added += (gl.fma(done, unit, acc[7] * rescale),)  # type: ignore[assignment]
    return added
