"""fp8_ds_mla on SM90: both products multiply the codes as they are cached.

Four warps copy tokens to shared memory; four (up to 16 heads a program) or eight compute. The other
factor of each product is split into two e4m3 numbers (`hopper_fp8_products.py`). A group's scales
multiply its scores, and the weights of its output. Products are transposed, as in the narrow
kernel. With 16 heads two programs share a multiprocessor, and one's waits hide behind the other.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from attention_worker.kernels.sparse_mla import hopper
from attention_worker.kernels.sparse_mla.hopper import (
    LN2,
    MASKED,
    UNSPECIALISED,
    load_query,
    read_slots,
    softmax_ends,
)
from attention_worker.kernels.sparse_mla.hopper_fp8_layouts import (
    output_layout,
    scores_layout,
    stored_columns,
)
from attention_worker.kernels.sparse_mla.hopper_fp8_products import (
    add_output,
    group_scale,
    halves,
    largest_scale,
    load_split_query,
    score_block,
    store_weights,
)

_COPY_WARPS = gl.constexpr(4)
_COPY_REGISTERS = gl.constexpr(32)


@gluon.constexpr_function
def _rows(elements, warps):
    """Four threads read 64 bytes of a token."""
    return gl.BlockedLayout([1, elements], [8, 4], [warps, 1], [1, 0])


@gluon.jit
def _columns(output, BLOCK_H: gl.constexpr, WARPS: gl.constexpr):
    """A piece's output [16 * WARPS, BLOCK_H], in the order of `_values` -> in its own."""
    ordered = output.reshape([WARPS, 2, 8, BLOCK_H]).permute((0, 2, 1, 3))
    return gl.convert_layout(
        ordered.reshape([16 * WARPS, BLOCK_H]), stored_columns(BLOCK_H, WARPS),
        assert_trivial=True,
    )  # fmt: skip


@gluon.jit
def _copy_all(
    cache, row_of_slots, first, end, last_slot, page, block_stride, token_stride, codes,
    rope_keys, scales, biases, full, free, BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """Copy the slots' tokens to the buffers, in turns; zeros and a MASKED bias where invalid."""
    LAYOUT: gl.constexpr = _rows(4, _COPY_WARPS)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    slot = read_slots(row_of_slots, first + n, end)
    for i in range(gl.cdiv(end - first, BLOCK_N)):
        following = read_slots(row_of_slots, first + (i + 1) * BLOCK_N + n, end)
        if PAGED:
            offset = (slot // page).to(gl.int64) * block_stride
            offset += (slot % page).to(gl.int64) * token_stride
        else:
            offset = slot.to(gl.int64) * token_stride
        valid = (slot >= 0) & (slot <= last_slot)
        row = (cache + gl.multiple_of(offset, 16)).to(gl.pointer_type(gl.int32))[:, None]
        mask = valid[:, None]
        buffer = i % BUFFERS
        mbarrier.wait(free.index(buffer), ((i // BUFFERS) & 1) ^ 1)
        biases.index(buffer).store(gl.where(valid, 0.0, MASKED))
        column = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
        async_copy.async_copy_global_to_shared(codes.index(buffer), row + column, mask=mask)
        column = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
        async_copy.async_copy_global_to_shared(
            scales.index(buffer), row + (128 + column), mask=mask
        )
        column = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
        async_copy.async_copy_global_to_shared(
            rope_keys.index(buffer), row + (132 + column), mask=mask
        )
        # Every thread's copies arrive by themselves; the biases were ordinary stores.
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(full.index(buffer), count=1)
        slot = following
    async_copy.wait_group(0)


@gluon.jit
def _store(
    acc, to, factor, heads, head_block, stride: gl.int64, BLOCK_H: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The output times its heads' factors, to a row a head."""
    STORE: gl.constexpr = stored_columns(BLOCK_H, WARPS)
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(0, STORE))
    to = to + (head.to(gl.int64) * stride)[None, :]
    to = to + gl.arange(0, 16 * WARPS, gl.SliceLayout(1, STORE))[:, None]
    for piece in gl.static_range(32 // WARPS):
        values = _columns(acc[piece] * factor[None, :], BLOCK_H, WARPS)
        at = to + 16 * WARPS * piece
        gl.store(at, values.to(to.dtype.element_ty), mask=(head < heads)[None, :])


@gluon.jit
def _flat(tile, BLOCK_H: gl.constexpr):
    """[64, BLOCK_H], as products leave it -> [BLOCK_H // 4, 256], a thread's pairs side by side."""
    parts = tile.reshape([4, 2, 8, BLOCK_H // 8, 4, 2]).permute((1, 3, 0, 2, 4, 5))
    return parts.reshape([BLOCK_H // 4, 256])


@gluon.jit
def _fold(acc, state, factor, before, weight, BLOCK_H: gl.constexpr):
    """Merge a split's output into what was merged of the splits before it.

    That lies in shared memory: there are not registers for it. Every thread reads only what it
    wrote.
    """
    LAYOUT: gl.constexpr = acc[0].type.layout
    every = gl.zeros([64, BLOCK_H], gl.float32, LAYOUT)
    before = _flat(every + before[None, :], BLOCK_H)
    weight = _flat(every + weight[None, :], BLOCK_H)
    merged = ()
    for part in gl.static_range(8):
        # Rounded as partial results are: a row's bits must not tell who merged it.
        rounded = (acc[part] * factor[None, :]).to(gl.bfloat16).to(gl.float32)
        old = state.index(part).load(before.type.layout)
        new = gl.fma(_flat(rounded, BLOCK_H), weight, old * before)
        state.index(part).store(new)
        tile = new.reshape([2, BLOCK_H // 8, 4, 8, 4, 2]).permute((2, 0, 3, 1, 4, 5))
        tile = gl.convert_layout(tile.reshape([64, BLOCK_H]), LAYOUT, assert_trivial=True)
        merged += (tile,)  # type: ignore[assignment]
    return merged


@gluon.jit
def _attend(
    latent, rope, out, lse, partial, partial_lse, scale, heads, k, per_split, splits, first,
    last, token, head_block, latent_token, latent_head, rope_token, rope_head, out_token,
    out_head, codes, rope_keys, scales, biases, full, free, BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr, SINGLE: gl.constexpr, FOLD: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = hopper.tile_layout()
    SCORES: gl.constexpr = scores_layout(BLOCK_H, WARPS)
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    OUTPUT: gl.constexpr = output_layout(BLOCK_H, WARPS)
    OUTPUT_HEADS: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    q = gl.allocate_shared_memory(
        gl.float8e4nv, [1, 2 * BLOCK_H, 512], gl.NVMMASharedLayout(128, 8, 2)
    )
    by_head = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], hopper.plain_layout())
    head_scales, rescales = by_head.index(0), by_head.index(1)
    load_split_query(
        latent, token, head_block, heads, latent_token, latent_head, q.index(0), head_scales,
        BLOCK_H, WARPS,
    )  # fmt: skip
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 64], TILE)
    load_query(
        rope, token, head_block, heads, rope_token, rope_head, q_rope.index(0), BLOCK_H, 64,
        hopper.gather_layout(WARPS),
    )  # fmt: skip
    shared_weights = gl.allocate_shared_memory(
        gl.int16, [8, BLOCK_H, 32], gl.NVMMASharedLayout(64, 16, 2)
    )
    nothing = gl.zeros([16 * WARPS, BLOCK_H], gl.float32, OUTPUT)
    if FOLD:
        merged_top = gl.full([BLOCK_H], MASKED, gl.float32, HEADS)
        merged_total = gl.zeros([BLOCK_H], gl.float32, HEADS)
        state = gl.allocate_shared_memory(
            gl.float32, [8, BLOCK_H // 4, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        flat = _flat(nothing, BLOCK_H)
        for part in gl.static_range(8):
            state.index(part).store(flat)
    fence_async_shared()
    gl.thread_barrier()

    for split in range(first, last):
        top = gl.full([BLOCK_H], MASKED, gl.float32, HEADS)
        totals, _ = halves(gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES), BLOCK_H)
        acc = (nothing, nothing, nothing, nothing)
        if WARPS == 4:
            acc += acc  # type: ignore[assignment]
        begin = (split - first) * (per_split // BLOCK_N)
        blocks = gl.cdiv(gl.minimum(per_split, k - split * per_split), BLOCK_N)
        for i in range(begin, begin + blocks):
            # Zero, but not for the compiler, which would make all products' descriptors before
            # the loop, and has not registers enough to keep them.
            zero = gl.where(i < 0, 1, 0)
            at = zero if BUFFERS == 1 else i % BUFFERS
            block = codes.index(at)._reinterpret(gl.int16, [BLOCK_N, 256], TILE)
            k_rope = rope_keys.index(at)._reinterpret(gl.bfloat16, [BLOCK_N, 64], TILE)
            mbarrier.wait(full.index(at), (i // BUFFERS) & 1)
            fence_async_shared()
            scores = score_block(
                block, k_rope, scales.index(at), q.index(zero), q_rope.index(zero),
                head_scales.load(HEADS)[None, :], BLOCK_H, WARPS,
            )  # fmt: skip
            bias = biases.index(at).load(gl.SliceLayout(1, SCORES))
            scores = scores * scale + bias[:, None]
            unit = largest_scale(scales.index(at), WARPS) * 2.0**-8
            new_top = gl.maximum(top, gl.max(scores, 0))
            weights = gl.exp2(scores - new_top[None, :])
            rescale = gl.exp2(top - new_top)
            top = new_top
            low, high = halves(weights, BLOCK_H)
            same_heads = gl.convert_layout(rescale, gl.SliceLayout(0, low.type.layout))
            totals = totals * same_heads[None, :] + (low + high)
            for group in gl.static_range(4):
                scaled = weights * (group_scale(scales.index(at), group, SCORES) * (1.0 / unit))
                store_weights(scaled, shared_weights, group, BLOCK_H)
            if WARPS == 4:
                rescale = gl.convert_layout(rescale, OUTPUT_HEADS, assert_trivial=True)[None, :]
            else:
                rescales.store(rescale)
            fence_async_shared()
            gl.thread_barrier()
            acc = add_output(
                block,
                shared_weights,
                zero,
                acc,
                rescale,
                rescales,
                unit,
                free.index(at),
                BLOCK_H,
                WARPS,
            )

        factor, log_sum = softmax_ends(top, gl.convert_layout(gl.sum(totals, 0), HEADS))
        if FOLD:
            merged_top, merged_total, before, weight = hopper.fold(
                merged_top, merged_total, log_sum
            )
            acc = _fold(
                acc, state, gl.convert_layout(factor, OUTPUT_HEADS),
                gl.convert_layout(before, OUTPUT_HEADS), gl.convert_layout(weight, OUTPUT_HEADS),
                BLOCK_H,
            )  # fmt: skip
            factor, log_sum = softmax_ends(merged_top, merged_total)
        factor = gl.convert_layout(factor, OUTPUT_HEADS)
        # The same: addresses are made here.
        some = head_block + gl.where(split < 0, 1, 0)
        head = some * BLOCK_H + gl.arange(0, BLOCK_H, HEADS)
        if SINGLE or FOLD:
            if split + 1 == splits:
                gl.store(lse + token * heads + head, log_sum * LN2, mask=head < heads)
                to = out + token * out_token
                _store(acc, to, factor, heads, some, out_head, BLOCK_H, WARPS)
        else:
            row = (token * splits + split) * heads
            gl.store(partial_lse + row + head, log_sum, mask=head < heads)
            _store(acc, partial + row * 512, factor, heads, some, 512, BLOCK_H, WARPS)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("slots", "lse"))
def fp8_kernel(
    latent, rope, cache, slots, out, lse, partial, partial_lse, scale, heads, k, per_split,
    splits, last_slot, page, block_stride: gl.int64, token_stride: gl.int64,
    latent_token: gl.int64, latent_head: gl.int64, rope_token: gl.int64, rope_head: gl.int64,
    slots_token: gl.int64, out_token: gl.int64, out_head: gl.int64, per_program,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr, PAGED: gl.constexpr,
    SINGLE: gl.constexpr, FOLD: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `split.split_kernel`, with FP8 and ROPE, and per_program splits a program.

    Four computing warps, with BLOCK_H 32 or more eight. FOLD (four warps only): a program has all
    splits, and merges them itself.
    """
    if PDL:
        gdc_launch_dependents()
    token, head_block, first, last = hopper.work(heads, splits, per_program, BLOCK_H)
    row_of_slots = slots + token * slots_token
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    codes = gl.allocate_shared_memory(gl.int32, [BUFFERS, BLOCK_N, 128], WORDS)
    rope_keys = gl.allocate_shared_memory(gl.int32, [BUFFERS, BLOCK_N, 32], WORDS)
    scales = gl.allocate_shared_memory(
        gl.int32, [BUFFERS, BLOCK_N, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    biases = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_N], hopper.plain_layout())
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=32 * _COPY_WARPS + 1)
        mbarrier.init(free.index(i), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_attend, (
                latent, rope, out, lse, partial, partial_lse, scale, heads, k, per_split, splits,
                first, last, token, head_block, latent_token, latent_head, rope_token, rope_head,
                out_token, out_head, codes, rope_keys, scales, biases, full, free, BLOCK_H,
                BLOCK_N, BUFFERS, SINGLE, FOLD, num_warps,
            )),
            (_copy_all, (
                cache, row_of_slots, first * per_split, gl.minimum(last * per_split, k),
                last_slot, page, block_stride, token_stride,
                codes, rope_keys, scales, biases, full, free, BLOCK_N, BUFFERS, PAGED,
            )),
        ],
        [_COPY_WARPS],
        [_COPY_REGISTERS],
    )  # fmt: skip
