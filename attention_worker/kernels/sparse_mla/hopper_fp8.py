"""fp8_ds_mla on SM90, 16 heads a program: eight warps gather and decode, four compute.

Codes travel through registers: the next block's are loaded while this block's are decoded to bf16
(exact) into the shared memory that both matrix products read. Rope values and scales are copied as
they are; scales multiply the scores of their group of 128 values, and the weights of that group's
output. Two buffers: one is computed with while the other is filled. The products are transposed,
as in the narrow kernel.
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
    load_query,
    read_slots,
    softmax_ends,
    work,
)
from attention_worker.kernels.sparse_mla.split import UNSPECIALISED

_DECODE_WARPS = gl.constexpr(8)
_DECODE_REGISTERS = gl.constexpr(128)

_DECODE = gl.constexpr("""
{
.reg .b16 p, q, r, s;
.reg .b32 h;
.reg .f32 x, y;
mov.b32 {p, q}, $2;
cvt.rn.f16x2.e4m3x2 h, p;
mov.b32 {r, s}, h;
cvt.f32.f16 x, r;
cvt.f32.f16 y, s;
cvt.rn.bf16x2.f32 $0, y, x;
cvt.rn.f16x2.e4m3x2 h, q;
mov.b32 {r, s}, h;
cvt.f32.f16 x, r;
cvt.f32.f16 y, s;
cvt.rn.bf16x2.f32 $1, y, x;
}
""")
"""Four codes -> two pairs of bf16, by way of fp16: every step is exact."""


@gluon.constexpr_function
def _rows(elements, warps):
    """Four threads read 64 bytes of a token. Eight read two tokens, whose places in swizzled
    shared memory then never share a bank."""
    return gl.BlockedLayout([1, elements], [8, 4], [warps, 1], [1, 0])


@gluon.jit
def _addresses(cache, slot, last_slot, page, block_stride, token_stride, PAGED: gl.constexpr):
    if PAGED:
        offset = (slot // page).to(gl.int64) * block_stride
        offset += (slot % page).to(gl.int64) * token_stride
    else:
        offset = slot.to(gl.int64) * token_stride
    valid = (slot >= 0) & (slot <= last_slot)
    return cache + gl.multiple_of(offset, 16), valid


@gluon.jit
def _load_codes(row, valid, LAYOUT: gl.constexpr):
    """Four groups of 128 codes, four to a 32-bit number."""
    words = row.to(gl.pointer_type(gl.int32))[:, None]
    words = words + gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    mask = valid[:, None]
    return (
        gl.load(words, mask=mask, other=0),
        gl.load(words + 32, mask=mask, other=0),
        gl.load(words + 64, mask=mask, other=0),
        gl.load(words + 96, mask=mask, other=0),
    )


@gluon.jit
def _copy_rest(row, valid, rope, scales, bias, WARPS: gl.constexpr):
    """Start copying rope values and scales; rows and mask are laid out as for the codes."""
    ROPE: gl.constexpr = _rows(8, WARPS)
    SCALES: gl.constexpr = _rows(4, WARPS)
    bias.store(gl.where(valid, 0.0, MASKED))
    at = gl.convert_layout(row, gl.SliceLayout(1, ROPE), assert_trivial=True)
    mask = gl.convert_layout(valid, gl.SliceLayout(1, ROPE), assert_trivial=True)[:, None]
    values = (at + 528).to(gl.pointer_type(gl.bfloat16))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, ROPE))[None, :]
    async_copy.async_copy_global_to_shared(rope, values + column, mask=mask)
    at = gl.convert_layout(row, gl.SliceLayout(1, SCALES), assert_trivial=True)
    mask = gl.convert_layout(valid, gl.SliceLayout(1, SCALES), assert_trivial=True)[:, None]
    values = (at + 512).to(gl.pointer_type(gl.float32))[:, None]
    column = gl.arange(0, 4, gl.SliceLayout(0, SCALES))[None, :]
    async_copy.async_copy_global_to_shared(scales, values + column, mask=mask)


@gluon.jit
def _decode(codes, shared, ROWS: gl.constexpr):
    low, high = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words = shared._reinterpret(gl.int32, [ROWS, 64], gl.NVMMASharedLayout(128, 32, 2))
    words.store(gl.join(low, high).reshape([ROWS, 64]))


@gluon.jit
def _decode_all(
    cache, row_of_slots, first, end, last_slot, page, block_stride, token_stride, keys0, keys1,
    keys2, keys3, rope_keys, scales, biases, full, free, BLOCK_N: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    CODES: gl.constexpr = _rows(4, _DECODE_WARPS)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, CODES))
    slot = read_slots(row_of_slots, first + n, end)
    row, valid = _addresses(cache, slot, last_slot, page, block_stride, token_stride, PAGED)
    slot = read_slots(row_of_slots, first + BLOCK_N + n, end)
    next0, next1, next2, next3 = _load_codes(row, valid, CODES)
    for i in range(gl.cdiv(end - first, BLOCK_N)):
        buffer = i % 2
        codes0, codes1, codes2, codes3 = next0, next1, next2, next3
        mbarrier.wait(free.index(buffer), ((i // 2) & 1) ^ 1)
        _copy_rest(
            row, valid, rope_keys.index(buffer), scales.index(buffer), biases.index(buffer),
            _DECODE_WARPS,
        )  # fmt: skip
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
        row, valid = _addresses(cache, slot, last_slot, page, block_stride, token_stride, PAGED)
        slot = read_slots(row_of_slots, first + (i + 2) * BLOCK_N + n, end)
        next0, next1, next2, next3 = _load_codes(row, valid, CODES)
        _decode(codes0, keys0.index(buffer), BLOCK_N)
        _decode(codes1, keys1.index(buffer), BLOCK_N)
        _decode(codes2, keys2.index(buffer), BLOCK_N)
        _decode(codes3, keys3.index(buffer), BLOCK_N)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(buffer), count=1)
    async_copy.wait_group(0)


@gluon.jit
def _attend(
    latent, rope, out, lse, partial, partial_lse, scale, heads, splits, first, end, token,
    split, head_block, latent_token, latent_head, rope_token, rope_head, out_token, out_head,
    keys0, keys1, keys2, keys3, rope_keys, scales, biases, full, free, BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr, SINGLE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = gl.bfloat16
    LOAD: gl.constexpr = hopper.gather_layout(4)
    TILE: gl.constexpr = hopper.tile_layout()
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    q = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 512], TILE)
    load_query(latent, token, head_block, heads, latent_token, latent_head, q, BLOCK_H, 512, LOAD)
    q_rope = gl.allocate_shared_memory(DTYPE, [BLOCK_H, 64], TILE)
    load_query(rope, token, head_block, heads, rope_token, rope_head, q_rope, BLOCK_H, 64, LOAD)
    q = q.permute((1, 0))
    weights0 = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], WEIGHTS)
    weights1 = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], WEIGHTS)
    weights2 = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], WEIGHTS)
    weights3 = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], WEIGHTS)
    fence_async_shared()
    gl.thread_barrier()

    top = gl.full([BLOCK_H], MASKED, gl.float32, gl.SliceLayout(0, SCORES))
    totals = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
    acc0 = gl.zeros([128, BLOCK_H], gl.float32, SCORES)
    acc1 = gl.zeros([128, BLOCK_H], gl.float32, SCORES)
    acc2 = gl.zeros([128, BLOCK_H], gl.float32, SCORES)
    acc3 = gl.zeros([128, BLOCK_H], gl.float32, SCORES)
    none = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
    for i in range(gl.cdiv(end - first, BLOCK_N)):
        at = i % 2
        k0, k1, k2, k3 = keys0.index(at), keys1.index(at), keys2.index(at), keys3.index(at)
        mbarrier.wait(full.index(at), (i // 2) & 1)
        fence_async_shared()
        part0 = warpgroup_mma(k0, q.slice(0, 128, 0), none, use_acc=False, is_async=True)
        part1 = warpgroup_mma(k1, q.slice(128, 128, 0), none, use_acc=False, is_async=True)
        part2 = warpgroup_mma(k2, q.slice(256, 128, 0), none, use_acc=False, is_async=True)
        part3 = warpgroup_mma(k3, q.slice(384, 128, 0), none, use_acc=False, is_async=True)
        scores = warpgroup_mma(
            rope_keys.index(at), q_rope.permute((1, 0)), none, use_acc=False, is_async=True
        )
        scale0 = scales.index(at).slice(0, 1, 1).load(SCORES)
        scale1 = scales.index(at).slice(1, 1, 1).load(SCORES)
        scale2 = scales.index(at).slice(2, 1, 1).load(SCORES)
        scale3 = scales.index(at).slice(3, 1, 1).load(SCORES)
        bias = biases.index(at).load(gl.SliceLayout(1, SCORES))
        part0, part1, part2, part3, scores = warpgroup_mma_wait(
            0, deps=[part0, part1, part2, part3, scores]
        )
        scores += part0 * scale0 + part1 * scale1
        scores += part2 * scale2 + part3 * scale3
        scores = scores * scale + bias[:, None]
        new_top = gl.maximum(top, gl.max(scores, 0))
        weights = gl.exp2(scores - new_top[None, :])
        rescale = gl.exp2(top - new_top)
        top = new_top
        weights0.store((weights * scale0).to(DTYPE))
        weights1.store((weights * scale1).to(DTYPE))
        weights2.store((weights * scale2).to(DTYPE))
        weights3.store((weights * scale3).to(DTYPE))
        factor = rescale[None, :]
        fence_async_shared()
        gl.thread_barrier()
        acc0 = warpgroup_mma(k0.permute((1, 0)), weights0, acc0 * factor, is_async=True)
        acc1 = warpgroup_mma(k1.permute((1, 0)), weights1, acc1 * factor, is_async=True)
        acc2 = warpgroup_mma(k2.permute((1, 0)), weights2, acc2 * factor, is_async=True)
        acc3 = warpgroup_mma(k3.permute((1, 0)), weights3, acc3 * factor, is_async=True)
        totals = totals * factor + weights
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
        gl.thread_barrier()
        mbarrier.arrive(free.index(at), count=1)

    factor, log_sum = softmax_ends(top, gl.sum(totals, 0))
    # Back to heads whose values lie together, so that stores are 16 bytes wide.
    STORE: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    acc0 = gl.convert_layout(acc0 * factor[None, :], STORE)
    acc1 = gl.convert_layout(acc1 * factor[None, :], STORE)
    acc2 = gl.convert_layout(acc2 * factor[None, :], STORE)
    acc3 = gl.convert_layout(acc3 * factor[None, :], STORE)
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(0, STORE))
    column = gl.arange(0, 128, gl.SliceLayout(1, STORE))[:, None]
    lse_head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(0, SCORES))
    if SINGLE:
        to = out + token * out_token + (head.to(gl.int64) * out_head)[None, :] + column
        gl.store(lse + token * heads + lse_head, log_sum * LN2, mask=lse_head < heads)
    else:
        at = (token * splits + split) * heads
        to = partial + ((at + head) * 512)[None, :] + column
        gl.store(partial_lse + at + lse_head, log_sum, mask=lse_head < heads)
    RESULT: gl.constexpr = to.dtype.element_ty
    mask = (head < heads)[None, :]
    gl.store(to, acc0.to(RESULT), mask=mask)
    gl.store(to + 128, acc1.to(RESULT), mask=mask)
    gl.store(to + 256, acc2.to(RESULT), mask=mask)
    gl.store(to + 384, acc3.to(RESULT), mask=mask)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("slots", "lse"))
def fp8_kernel(
    latent, rope, cache, slots, out, lse, partial, partial_lse, scale, heads, k, per_split,
    splits, last_slot, page, block_stride: gl.int64, token_stride: gl.int64,
    latent_token: gl.int64, latent_head: gl.int64, rope_token: gl.int64, rope_head: gl.int64,
    slots_token: gl.int64, out_token: gl.int64, out_head: gl.int64,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, PAGED: gl.constexpr, SINGLE: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `split.split_kernel`, with FP8 and ROPE, and four computing warps."""
    if PDL:
        gdc_launch_dependents()
    TILE: gl.constexpr = hopper.tile_layout()
    token, head_block, split, first, end = work(heads, splits, per_split, k, BLOCK_H)
    row_of_slots = slots + token * slots_token
    keys0 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 128], TILE)
    keys1 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 128], TILE)
    keys2 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 128], TILE)
    keys3 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 128], TILE)
    rope_keys = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 64], TILE)
    scales = gl.allocate_shared_memory(
        gl.float32, [2, BLOCK_N, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    biases = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], hopper.plain_layout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=32 * _DECODE_WARPS + 1)
        mbarrier.init(free.index(i), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_attend, (
                latent, rope, out, lse, partial, partial_lse, scale, heads, splits, first, end,
                token, split, head_block, latent_token, latent_head, rope_token, rope_head,
                out_token, out_head, keys0, keys1, keys2, keys3, rope_keys, scales, biases,
                full, free, BLOCK_H, BLOCK_N, SINGLE,
            )),
            (_decode_all, (
                cache, row_of_slots, first, end, last_slot, page, block_stride, token_stride,
                keys0, keys1, keys2, keys3, rope_keys, scales, biases, full, free, BLOCK_N,
                PAGED,
            )),
        ],
        [_DECODE_WARPS],
        [_DECODE_REGISTERS],
    )  # fmt: skip
