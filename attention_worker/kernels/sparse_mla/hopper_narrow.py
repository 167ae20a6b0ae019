"""Up to 32 heads a program on SM90: the matrix products are transposed.

S' = K Q' and O' = V' P': gathered tokens, of which there are 64, are the side that the matrix
instructions want to be 64 long, and the few heads the side that may be short. A gathered block is
read twice from shared memory and once from the cache. With one buffer two programs share a
multiprocessor and hide each other's waits; with two a program hides its own.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from attention_worker.kernels.sparse_mla import hopper
from attention_worker.kernels.sparse_mla.hopper import (
    LN2,
    MASKED,
    UNSPECIALISED,
    gather,
    load_query,
    read_slots,
    softmax_ends,
)


@gluon.jit
def _store(
    acc, log_sum, to, to_lse, heads, head_block, stride: gl.int64, BLOCK_H: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The output [512, BLOCK_H] to a row a head, and the heads' logarithms."""
    # Heads whose values lie together, so that stores are 16 bytes wide.
    STORE: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [num_warps, 1], [0, 1])
    acc = gl.convert_layout(acc, STORE)
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(0, STORE))
    column = gl.arange(0, 512, gl.SliceLayout(1, STORE))[:, None]
    to = to + (head.to(gl.int64) * stride)[None, :] + column
    gl.store(to, acc.to(to.dtype.element_ty), mask=(head < heads)[None, :])
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, log_sum.type.layout)
    gl.store(to_lse + head, log_sum, mask=head < heads)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("slots", "lse"))
def narrow_kernel(
    latent, rope, cache, slots, out, lse, partial, partial_lse, scale, heads, k, per_split,
    splits, last_slot, page, block_stride: gl.int64, token_stride: gl.int64,
    latent_token: gl.int64, latent_head: gl.int64, rope_token: gl.int64, rope_head: gl.int64,
    slots_token: gl.int64, out_token: gl.int64, out_head: gl.int64, per_program,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr, ROPE: gl.constexpr,
    PAGED: gl.constexpr, SINGLE: gl.constexpr, FOLD: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """As `split.split_kernel`, with per_program splits a program.

    BUFFERS: gathered blocks in shared memory. FOLD: a program has all splits, and merges them.
    """
    if PDL:
        gdc_launch_dependents()
    DTYPE: gl.constexpr = cache.dtype.element_ty
    GATHER: gl.constexpr = hopper.gather_layout(num_warps)
    TILE: gl.constexpr = hopper.tile_layout()
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_H, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    token, head_block, first, last = hopper.work(heads, splits, per_program, BLOCK_H)
    end = gl.minimum(last * per_split, k)
    row_of_slots = slots + token * slots_token
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, GATHER))

    keys = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_N, 512], TILE)
    rope_keys = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_N, 64], TILE)
    biases = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_N], hopper.plain_layout())
    ahead = first * per_split
    slot = read_slots(row_of_slots, ahead + n, end)
    for i in gl.static_range(BUFFERS):
        ahead += BLOCK_N
        following = read_slots(row_of_slots, ahead + n, end)
        gather(
            cache, slot, last_slot, page, block_stride, token_stride, keys.index(i),
            rope_keys.index(i), biases.index(i), GATHER, PAGED, ROPE,
        )  # fmt: skip
        async_copy.commit_group()
        slot = following
    # Queries come after the first gathers were started: nothing waits for them sooner.
    queries = gl.allocate_shared_memory(DTYPE, [1, BLOCK_H, 512], TILE)
    load_query(
        latent, token, head_block, heads, latent_token, latent_head, queries.index(0), BLOCK_H, 512,
        GATHER,
    )  # fmt: skip
    q_rope = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 64], TILE)
    if ROPE:
        load_query(
            rope, token, head_block, heads, rope_token, rope_head, q_rope, BLOCK_H, 64, GATHER
        )
    shared_weights = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], WEIGHTS)

    nothing = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
    buffer = 0
    if FOLD:
        merged_top = gl.full([BLOCK_H], MASKED, gl.float32, HEADS)
        merged_total = gl.zeros([BLOCK_H], gl.float32, HEADS)
        merged = gl.zeros([512, BLOCK_H], gl.float32, SCORES)
    for split in range(first, last):
        top = gl.full([BLOCK_H], MASKED, gl.float32, HEADS)
        # Summed over the tokens of a place in the block now, over the places at the end.
        totals = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
        acc = gl.zeros([512, BLOCK_H], gl.float32, SCORES)
        for _ in range(gl.cdiv(gl.minimum(per_split, k - split * per_split), BLOCK_N)):
            async_copy.wait_group(BUFFERS - 1)
            fence_async_shared()
            gl.thread_barrier()
            # Zero, but not for the compiler, which would make all products' descriptors before
            # the loop, and has not registers enough to keep them.
            zero = gl.where(ahead < 0, 1, 0)
            if BUFFERS == 1:
                buffer = zero
            block = keys.index(buffer)
            q = queries.index(zero)
            scores = warpgroup_mma(block, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if ROPE:
                scores = warpgroup_mma(
                    rope_keys.index(buffer), q_rope.permute((1, 0)), scores, is_async=True
                )
            bias = biases.index(buffer).load(gl.SliceLayout(1, SCORES))
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = scores * scale + bias[:, None]
            new_top = gl.maximum(top, gl.max(scores, 0))
            weights = gl.exp2(scores - new_top[None, :])
            rescale = gl.exp2(top - new_top)
            top = new_top
            shared_weights.store(weights.to(DTYPE))
            acc = acc * rescale[None, :]
            fence_async_shared()
            gl.thread_barrier()
            acc = warpgroup_mma(block.permute((1, 0)), shared_weights, acc, is_async=True)
            totals = totals * rescale[None, :] + weights
            ahead += BLOCK_N
            following = read_slots(row_of_slots, ahead + n, end)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            gather(
                cache, slot, last_slot, page, block_stride, token_stride, block,
                rope_keys.index(buffer), biases.index(buffer), GATHER, PAGED, ROPE,
            )  # fmt: skip
            async_copy.commit_group()
            slot = following
            if BUFFERS > 1:
                buffer = gl.where(buffer + 1 == BUFFERS, 0, buffer + 1)

        factor, log_sum = softmax_ends(top, gl.sum(totals, 0))
        acc = acc * factor[None, :]
        if FOLD:
            merged_top, merged_total, before, weight = hopper.fold(
                merged_top, merged_total, log_sum
            )
            # Rounded as partial results are: a row's bits must not tell who merged it.
            rounded = acc.to(partial.dtype.element_ty).to(gl.float32)
            merged = gl.fma(rounded, gl.zeros_like(acc) + weight[None, :], merged * before[None, :])
            if split + 1 == splits:
                factor, log_sum = softmax_ends(merged_top, merged_total)
                acc = merged * factor[None, :]
        # The same: addresses are made here.
        some = head_block + gl.where(ahead < 0, 1, 0)
        if SINGLE or FOLD:
            if split + 1 == splits:
                _store(
                    acc, log_sum * LN2, out + token * out_token, lse + token * heads, heads,
                    some, out_head, BLOCK_H, num_warps,
                )  # fmt: skip
        else:
            row = (token * splits + split) * heads
            _store(
                acc, log_sum, partial + row * 512, partial_lse + row, heads, some, 512,
                BLOCK_H, num_warps,
            )  # fmt: skip
    async_copy.wait_group(0)
