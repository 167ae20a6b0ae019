"""Few tokens of more than 32 heads on SM90, batch-invariant: the bits of `hopper_wide`, sooner.

A split's blocks are eight steps of one chain there, and few tokens leave most of the GPU idle. Of
the chain only the output needs its order. So one kernel computes the scores of every block in a
program of its own, and a second one the output, a program for a few of its columns, which has all
of its blocks on their way at once. The arithmetic of an element is the wide kernel's, in its order
and with its functions: how many tokens there are does not show.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention_worker.kernels.sparse_mla import hopper
from attention_worker.kernels.sparse_mla.hopper import (
    MASKED,
    UNSPECIALISED,
    gather,
    load_query,
    read_slots,
    token_of,
)
from attention_worker.kernels.sparse_mla.hopper_wide import (
    biased,
    output_layout,
    scores_layout,
    softmax,
    start_output,
    start_products,
    store,
)

WARPS = 8
"""Of both kernels, as many as compute in the wide one."""


@gluon.constexpr_function
def columns_layout(columns, warps):
    """As many threads read a token as are needed for its columns."""
    across = columns // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _tile(scores, tile, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where a block's scores lie [BLOCK_H, BLOCK_N]."""
    LAYOUT: gl.constexpr = scores_layout(BLOCK_N)
    head = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))[:, None]
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
    return scores + tile.to(gl.int64) * (BLOCK_H * BLOCK_N) + head * BLOCK_N + place


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("slots",))
def scores_kernel(
    latent, rope, cache, slots, scores, scale, heads, k, last_slot, page, block_stride: gl.int64,
    token_stride: gl.int64, latent_token: gl.int64, latent_head: gl.int64, rope_token: gl.int64,
    rope_head: gl.int64, slots_token: gl.int64, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    ROPE: gl.constexpr, PAGED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Scores of one token's block of heads and one block of its slots.

    scores: fp32 [T, blocks of heads, blocks of slots, BLOCK_H, BLOCK_N], base 2, MASKED where a
    slot takes no part.
    """
    gdc_launch_dependents()
    DTYPE: gl.constexpr = cache.dtype.element_ty
    LOAD: gl.constexpr = hopper.gather_layout(num_warps)
    TILE: gl.constexpr = hopper.tile_layout()
    program = gl.program_id(0)
    blocks = gl.cdiv(k, BLOCK_N)
    head_blocks = gl.cdiv(heads, BLOCK_H)
    block = program % blocks
    head_block = (program // blocks) % head_blocks
    token = (program // (blocks * head_blocks)).to(gl.int64)

    keys = gl.allocate_shared_memory(DTYPE, [BLOCK_N, 512], TILE)
    rope_keys = gl.allocate_shared_memory(DTYPE, [BLOCK_N, 64], TILE)
    biases = gl.allocate_shared_memory(gl.float32, [BLOCK_N], hopper.plain_layout())
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOAD))
    slot = read_slots(slots + token * slots_token, block * BLOCK_N + n, k)
    gather(
        cache, slot, last_slot, page, block_stride, token_stride, keys, rope_keys, biases, LOAD,
        PAGED, ROPE,
    )  # fmt: skip
    async_copy.commit_group()
    q = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 512], TILE)
    load_query(latent, token, head_block, heads, latent_token, latent_head, q, BLOCK_H, 512, LOAD)
    q_rope = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 64], TILE)
    if ROPE:
        load_query(rope, token, head_block, heads, rope_token, rope_head, q_rope, BLOCK_H, 64, LOAD)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    nothing = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, scores_layout(BLOCK_N))
    products = start_products(q, q_rope, keys, rope_keys, nothing, ROPE)
    products = warpgroup_mma_wait(0, deps=[products])
    gl.store(_tile(scores, program, BLOCK_H, BLOCK_N), biased(products, scale, biases))


@gluon.jit
def _gather_columns(
    cache, slot, last_slot, page, block_stride, token_stride, first_column, to,
    LAYOUT: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Start copying some columns of the slots' tokens; zeros where invalid."""
    COLUMNS: gl.constexpr = to.shape[1]
    row, valid = token_of(cache, slot, last_slot, page, block_stride, token_stride, PAGED)
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(to, row + column, mask=valid[:, None])
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=UNSPECIALISED,
    do_not_specialize_on_alignment=("slots", "lse"),
)
def outputs_kernel(
    scores, cache, slots, out, lse, partial, partial_lse, heads, k, per_split, splits, last_slot,
    page, block_stride: gl.int64, token_stride: gl.int64, slots_token: gl.int64,
    out_token: gl.int64, out_head: gl.int64, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr, BUFFERS: gl.constexpr, PAGED: gl.constexpr, SINGLE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """COLUMNS of the output of one token's block of heads and one split; as `hopper_wide`.

    BUFFERS: blocks of tokens that are on their way or used.
    """
    gdc_launch_dependents()
    DTYPE: gl.constexpr = cache.dtype.element_ty
    LOAD: gl.constexpr = columns_layout(COLUMNS, num_warps)
    SCORES: gl.constexpr = scores_layout(BLOCK_N)
    PARTS: gl.constexpr = 512 // COLUMNS
    program = gl.program_id(0)
    head_blocks = gl.cdiv(heads, BLOCK_H)
    first_column = (program % PARTS) * COLUMNS
    split = (program // PARTS) % splits
    head_block = (program // (PARTS * splits)) % head_blocks
    token = (program // (PARTS * splits * head_blocks)).to(gl.int64)
    begin = split * per_split
    blocks = gl.cdiv(gl.minimum(per_split, k - begin), BLOCK_N)

    # Tokens are on their way before the scores are there, which another kernel computes.
    keys = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, BLOCK_N, COLUMNS], gl.NVMMASharedLayout(2 * min(COLUMNS, 64), 16, 2)
    )
    row_of_slots = slots + token * slots_token
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOAD))
    first_slots = ()
    for i in gl.static_range(BUFFERS):
        some = read_slots(row_of_slots, begin + i * BLOCK_N + n, k)
        first_slots += (gl.where(i < blocks, some, -1),)  # type: ignore[assignment]
    for i in gl.static_range(BUFFERS):
        _gather_columns(
            cache, first_slots[i], last_slot, page, block_stride, token_stride, first_column,
            keys.index(i), LOAD, PAGED,
        )  # fmt: skip
    shared_weights = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], hopper.tile_layout())
    top = gl.full([BLOCK_H], MASKED, gl.float32, gl.SliceLayout(1, SCORES))
    totals = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    acc = gl.zeros([BLOCK_H, COLUMNS], gl.float32, output_layout(COLUMNS))
    tile = (token * head_blocks + head_block) * gl.cdiv(k, BLOCK_N) + begin // BLOCK_N
    following = 0
    gdc_wait()
    ahead = gl.load(_tile(scores, tile, BLOCK_H, BLOCK_N))
    for i in range(blocks):
        current = ahead
        tile += 1
        if i + 1 < blocks:
            ahead = gl.load(_tile(scores, tile, BLOCK_H, BLOCK_N))
        top, totals, weights, rescale = softmax(current, top, totals)
        async_copy.wait_group(BUFFERS - 1)
        block = keys.index(i % BUFFERS)
        acc = start_output(weights, rescale, acc, block, shared_weights)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        following = i + BUFFERS
        slot = read_slots(row_of_slots, begin + following * BLOCK_N + n, k)
        _gather_columns(
            cache, gl.where(following < blocks, slot, -1), last_slot, page, block_stride,
            token_stride, first_column, block, LOAD, PAGED,
        )  # fmt: skip
    store(
        acc, top, totals, out, lse, partial, partial_lse, heads, splits, token, split, head_block,
        out_token, out_head, first_column, BLOCK_H, COLUMNS, SINGLE,
    )  # fmt: skip
    async_copy.wait_group(0)
