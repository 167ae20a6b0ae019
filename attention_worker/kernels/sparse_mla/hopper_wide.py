"""64 heads a program on SM90: one group of warps gathers, two compute.

Heads are the long side of both matrix products; the two warpgroups share the scores' tokens and
the output's columns. Four more warps gather 64 tokens at a time into two buffers; barriers in
shared memory say which buffer is full and which is free. The next block's scores are started
before the last block's output is done, so that the matrix units always have work queued.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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

_GATHER_WARPS = gl.constexpr(4)
_GATHER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _gather_all(
    cache, row_of_slots, first, end, last_slot, page, block_stride, token_stride, keys,
    rope_keys, biases, full, free, BLOCK_N: gl.constexpr, PAGED: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = hopper.gather_layout(_GATHER_WARPS)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    slot = read_slots(row_of_slots, first + n, end)
    for i in range(gl.cdiv(end - first, BLOCK_N)):
        following = read_slots(row_of_slots, first + (i + 1) * BLOCK_N + n, end)
        buffer = i % 2
        mbarrier.wait(free.index(buffer), ((i // 2) & 1) ^ 1)
        gather(
            cache, slot, last_slot, page, block_stride, token_stride, keys.index(buffer),
            rope_keys.index(buffer), biases.index(buffer), LAYOUT, PAGED, ROPE,
        )  # fmt: skip
        # Every thread's copies arrive by themselves; the biases were ordinary stores.
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(full.index(buffer), count=1)
        slot = following
    async_copy.wait_group(0)


@gluon.constexpr_function
def scores_layout(block_tokens):
    """[heads, block_tokens]: the warpgroups share the tokens."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, block_tokens // 2, 16])


@gluon.constexpr_function
def output_layout(columns):
    """[heads, columns]: the warpgroups share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@gluon.jit
def start_products(q, q_rope, keys, rope_keys, nothing, ROPE: gl.constexpr):
    """Queue a block's products with the queries."""
    products = warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if ROPE:
        products = warpgroup_mma(q_rope, rope_keys.permute((1, 0)), products, is_async=True)
    return products


@gluon.jit
def biased(products, scale, biases):
    """Scores: products times scale, MASKED where the bias is."""
    bias = biases.load(gl.SliceLayout(0, products.type.layout))
    return gl.fma(products, scale, bias[None, :])


@gluon.jit
def softmax(scores, top, totals):
    """A block's weights; running maximum, sums by place in the block, and what rescales before.

    Every rounding is written out: whoever computes a row gives it the same bits.
    """
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - new_top[:, None])
    rescale = gl.exp2(top - new_top)
    return new_top, gl.fma(totals, rescale[:, None], weights), weights, rescale


@gluon.jit
def start_output(weights, rescale, acc, keys, shared_weights):
    """Queue a block's output; what came before is rescaled."""
    shared_weights.store(weights.to(shared_weights.dtype))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    fence_async_shared()
    gl.thread_barrier()
    return warpgroup_mma(shared_weights, keys, acc, is_async=True)


@gluon.jit
def store(
    acc, top, totals, out, lse, partial, partial_lse, heads, splits, token, split, head_block,
    out_token, out_head, first_column, BLOCK_H: gl.constexpr, COLUMNS: gl.constexpr,
    SINGLE: gl.constexpr,
):  # fmt: skip
    """A split's output in COLUMNS of the 512, and with the first of them the logarithms."""
    SCORES: gl.constexpr = totals.type.layout
    OUTPUT: gl.constexpr = acc.type.layout
    factor, log_sum = softmax_ends(top, gl.sum(totals, 1))
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))[:, None]
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(1, OUTPUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUTPUT))[None, :]
    lse_head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    told = (lse_head < heads) & (first_column == 0)
    if SINGLE:
        to = out + token * out_token + (head.to(gl.int64) * out_head)[:, None] + column
        gl.store(to, acc.to(out.dtype.element_ty), mask=(head < heads)[:, None])
        gl.store(lse + token * heads + lse_head, log_sum * LN2, mask=told)
    else:
        at = (token * splits + split) * heads
        to = partial + ((at + head) * 512)[:, None] + column
        gl.store(to, acc.to(partial.dtype.element_ty), mask=(head < heads)[:, None])
        gl.store(partial_lse + at + lse_head, log_sum, mask=told)


@gluon.jit
def _start_scores(i, q, q_rope, keys, rope_keys, full, nothing, ROPE: gl.constexpr):
    """Wait until block i is there, and queue its products."""
    buffer = i % 2
    mbarrier.wait(full.index(buffer), (i // 2) & 1)
    fence_async_shared()
    return start_products(q, q_rope, keys.index(buffer), rope_keys.index(buffer), nothing, ROPE)


@gluon.jit
def _start_output(i, products, top, totals, acc, scale, keys, biases, shared_weights):
    """Softmax of block i's scores, and queue their output."""
    scores = biased(products, scale, biases.index(i % 2))
    top, totals, weights, rescale = softmax(scores, top, totals)
    acc = start_output(weights, rescale, acc, keys.index(i % 2), shared_weights)
    return top, totals, acc


@gluon.jit
def _attend(
    latent, rope, out, lse, partial, partial_lse, scale, heads, k, per_split, splits, first,
    last, token, head_block, latent_token, latent_head, rope_token, rope_head, out_token,
    out_head, keys, rope_keys, biases, full, free, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    ROPE: gl.constexpr, SINGLE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = keys.dtype
    LOAD: gl.constexpr = hopper.gather_layout(8)
    TILE: gl.constexpr = hopper.tile_layout()
    SCORES: gl.constexpr = scores_layout(BLOCK_N)
    q = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 512], TILE)
    load_query(latent, token, head_block, heads, latent_token, latent_head, q, BLOCK_H, 512, LOAD)
    q_rope = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 64], TILE)
    if ROPE:
        load_query(rope, token, head_block, heads, rope_token, rope_head, q_rope, BLOCK_H, 64, LOAD)
    shared_weights = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], TILE)
    fence_async_shared()
    gl.thread_barrier()

    nothing = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    i = 0
    for split in range(first, last):
        top = gl.full([BLOCK_H], MASKED, gl.float32, gl.SliceLayout(1, SCORES))
        totals = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
        acc = gl.zeros([BLOCK_H, 512], gl.float32, output_layout(512))
        scores = _start_scores(i, q, q_rope, keys, rope_keys, full, nothing, ROPE)
        for _ in range(gl.cdiv(gl.minimum(per_split, k - split * per_split), BLOCK_N) - 1):
            scores = warpgroup_mma_wait(0, deps=[scores])
            top, totals, acc = _start_output(
                i, scores, top, totals, acc, scale, keys, biases, shared_weights
            )
            scores = _start_scores(i + 1, q, q_rope, keys, rope_keys, full, nothing, ROPE)
            acc = warpgroup_mma_wait(1, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(free.index(i % 2), count=1)
            i += 1
        scores = warpgroup_mma_wait(0, deps=[scores])
        top, totals, acc = _start_output(
            i, scores, top, totals, acc, scale, keys, biases, shared_weights
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(free.index(i % 2), count=1)
        i += 1

        store(
            acc, top, totals, out, lse, partial, partial_lse, heads, splits, token, split,
            head_block, out_token, out_head, 0, BLOCK_H, 512, SINGLE,
        )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("slots", "lse"))
def wide_kernel(
    latent, rope, cache, slots, out, lse, partial, partial_lse, scale, heads, k, per_split,
    splits, last_slot, page, block_stride: gl.int64, token_stride: gl.int64,
    latent_token: gl.int64, latent_head: gl.int64, rope_token: gl.int64, rope_head: gl.int64,
    slots_token: gl.int64, out_token: gl.int64, out_head: gl.int64, per_program,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, ROPE: gl.constexpr, PAGED: gl.constexpr,
    SINGLE: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `split.split_kernel`, with per_program splits a program.

    BLOCK_H is 64, and eight warps compute.
    """
    if PDL:
        gdc_launch_dependents()
    DTYPE: gl.constexpr = cache.dtype.element_ty
    TILE: gl.constexpr = hopper.tile_layout()
    token, head_block, first, last = hopper.work(heads, splits, per_program, BLOCK_H)
    row_of_slots = slots + token * slots_token
    keys = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, 512], TILE)
    rope_keys = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, 64], TILE)
    biases = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], hopper.plain_layout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=32 * _GATHER_WARPS + 1)
        mbarrier.init(free.index(i), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_attend, (
                latent, rope, out, lse, partial, partial_lse, scale, heads, k, per_split, splits,
                first, last, token, head_block, latent_token, latent_head, rope_token, rope_head,
                out_token, out_head, keys, rope_keys, biases, full, free, BLOCK_H, BLOCK_N,
                ROPE, SINGLE,
            )),
            (_gather_all, (
                cache, row_of_slots, first * per_split, gl.minimum(last * per_split, k),
                last_slot, page, block_stride, token_stride,
                keys, rope_keys, biases, full, free, BLOCK_N, PAGED, ROPE,
            )),
        ],
        [_GATHER_WARPS],
        [_GATHER_REGISTERS],
    )  # fmt: skip
