"""What the two kernels for SM90 share: which work a program has, gathering, queries, layouts.

Written in Gluon, Triton's lower level, because two things decide there and Triton leaves neither
to its user: gathered tokens go straight to the shared memory that both matrix products read, and
who waits for them when.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attention_worker.kernels.sparse_mla import split

UNSPECIALISED = (*split.UNSPECIALISED, "per_program")

MASKED = gl.constexpr(-1e30)
"""Score of what takes no part. Not -inf, whose differences are NaN."""

LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def gather_layout(warps):
    """Eight threads read 128 bytes of a token, so that a warp's reads are whole sectors."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def tile_layout():
    """Shared memory as the matrix instructions want it."""
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.constexpr_function
def plain_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def work(heads, splits, per_program, BLOCK_H: gl.constexpr):
    """This program's token (int64), block of heads, first split, and the split it ends before."""
    program = gl.program_id(0)
    head_blocks = gl.cdiv(heads, BLOCK_H)
    parts = gl.cdiv(splits, per_program)
    head_block = program % head_blocks
    first = ((program // head_blocks) % parts) * per_program
    token = (program // (head_blocks * parts)).to(gl.int64)
    return token, head_block, first, gl.minimum(first + per_program, splits)


@gluon.jit
def read_slots(row_of_slots, at, end):
    return gl.load(row_of_slots + at, mask=at < end, other=-1)


@gluon.jit
def token_of(
    cache, slot, last_slot, page, block_stride: gl.int64, token_stride: gl.int64,
    PAGED: gl.constexpr,
):  # fmt: skip
    """Where the slots' tokens begin [slots, 1], and which slots are valid [slots]."""
    valid = (slot >= 0) & (slot <= last_slot)
    if PAGED:
        offset = (slot // page).to(gl.int64) * block_stride
        offset += (slot % page).to(gl.int64) * token_stride
    else:
        offset = slot.to(gl.int64) * token_stride
    return (cache + gl.multiple_of(offset, 8))[:, None], valid


@gluon.jit
def gather(
    cache, slot, last_slot, page, block_stride, token_stride, latent, rope, bias,
    LAYOUT: gl.constexpr, PAGED: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Start copying the slots' tokens to shared memory; zeros and a MASKED bias where invalid."""
    row, valid = token_of(cache, slot, last_slot, page, block_stride, token_stride, PAGED)
    bias.store(gl.where(valid, 0.0, MASKED))
    if ROPE:
        column = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
        async_copy.async_copy_global_to_shared(rope, row + 512 + column, mask=valid[:, None])
    column = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(latent, row + column, mask=valid[:, None])


@gluon.jit
def load_query(
    query, token, head_block, heads, token_stride, head_stride, shared, BLOCK_H: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    row = query + gl.multiple_of(token * token_stride, 8)
    row = row + gl.multiple_of(head.to(gl.int64) * head_stride, 8)[:, None]
    values = gl.load(row + column, mask=(head < heads)[:, None], other=0.0)
    shared.store(values.to(shared.dtype))


@gluon.jit
def softmax_ends(top, total):
    """Running maximum and sum -> factor of the output, logarithm (base 2) of the sum.

    Without a valid slot the maximum stayed MASKED and every weight was 1: nothing of it counts.
    """
    live = top > 0.5 * MASKED
    return gl.where(live, 1.0 / total, 0.0), gl.where(live, top + gl.log2(total), float("-inf"))


@gluon.jit
def fold(top, total, log_sum):
    """One split more merged: `merge.fold` in Gluon, with the same bits."""
    log_sum = gl.maximum(log_sum, MASKED)
    new_top = gl.maximum(top, log_sum)
    before = gl.exp2(top - new_top)
    weight = gl.exp2(log_sum - new_top)
    return new_top, gl.fma(total, before, weight), before, weight
