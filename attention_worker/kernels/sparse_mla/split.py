"""One part of a token's slots, on any GPU from SM80 up: the kernel that reads the cache.

A program takes one token, up to BLOCK_H heads and one split of the token's slots. It gathers
BLOCK_N cache tokens at a time (the next ones are on their way meanwhile) and keeps the softmax
online. The latent part is handled in four groups of 128 values: smaller blocks leave registers
free, and groups are how fp8_ds_mla scales: a scale multiplies the group's scores and weights, so
that the values that the dots read are exact.
"""

import triton
import triton.language as tl

from attention_worker.kernels.sparse_mla.fp8 import decode_e4m3

MASKED = tl.constexpr(-1e30)
"""Score of what takes no part. Not -inf, whose differences are NaN."""

LN2 = tl.constexpr(0.6931471805599453)

UNSPECIALISED = (
    "scale", "heads", "k", "per_split", "splits", "last_slot", "page", "block_stride",
    "token_stride", "latent_token", "latent_head", "rope_token", "rope_head", "slots_token",
    "out_token", "out_head",
)  # fmt: skip
"""Numbers whose values must not make new kernels."""


@triton.jit
def _load_group(
    row, GROUP: tl.constexpr, valid, BLOCK_N: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr
):
    if FP8:
        words = row.to(tl.pointer_type(tl.int32))[:, None] + GROUP * 32
        words = tl.load(words + tl.arange(0, 32)[None, :], mask=valid[:, None], other=0)
        return decode_e4m3(words, BLOCK_N, NATIVE)
    else:
        values = row[:, None] + (GROUP * 128 + tl.arange(0, 128))[None, :]
        return tl.load(values, mask=valid[:, None], other=0.0)


@triton.jit
def _group_scale(row, GROUP: tl.constexpr, valid, FP8: tl.constexpr):
    if FP8:
        scales = (row + 512).to(tl.pointer_type(tl.float32))
        return tl.load(scales + GROUP, mask=valid, other=0.0)[None, :]
    else:
        return 1.0


@triton.jit
def _add_scores(scores, keys, query, scale, FP8: tl.constexpr):
    if FP8:
        return scores + tl.dot(query, tl.trans(keys)) * scale
    else:
        return tl.dot(query, tl.trans(keys), scores)


@triton.jit
def _add_values(acc, values, weights, scale, rescale, FP8: tl.constexpr):
    if FP8:
        weights = weights * scale
    return tl.dot(weights.to(values.dtype), values, acc * rescale[:, None])


@triton.jit
def _load_query(query, heads, columns, inside, head_stride, VECTOR: tl.constexpr, dtype):
    offset = tl.multiple_of(heads * head_stride, VECTOR)
    at = query + offset[:, None] + columns[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0).to(dtype)


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("slots", "lse"))
def split_kernel(
    latent, rope, cache, slots, out, lse, partial, partial_lse, scale, heads, k, per_split,
    splits, last_slot, page, block_stride: tl.int64, token_stride: tl.int64,
    latent_token: tl.int64, latent_head: tl.int64, rope_token: tl.int64, rope_head: tl.int64,
    slots_token: tl.int64, out_token: tl.int64, out_head: tl.int64,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ROPE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, PAGED: tl.constexpr, VECTOR: tl.constexpr,
    SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one token, BLOCK_H heads, over the slots [split * per_split, + per_split).

    SINGLE: there is one split, and the answer goes to out [T, N, 512] and lse [T, N]; otherwise
    to partial [T, splits, N, 512] and partial_lse fp32 (base 2) for `merge`.
    PAGED: blocks do not follow each other without a gap. VECTOR: elements that rows are aligned
    to. PDL: let the merge's programs start early (SM90).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head_blocks = tl.cdiv(heads, BLOCK_H)
    head_block = program % head_blocks
    split = (program // head_blocks) % splits
    token = (program // (head_blocks * splits)).to(tl.int64)
    dtype = tl.bfloat16 if FP8 else cache.dtype.element_ty

    head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < heads
    c = tl.arange(0, 128)
    r = tl.arange(0, 64)
    n = tl.arange(0, BLOCK_N)
    row_of_slots = slots + token * slots_token
    first = split * per_split
    end = tl.minimum(first + per_split, k)
    following = tl.load(row_of_slots + first + n, mask=first + n < end, other=-1)

    q = latent + tl.multiple_of(token * latent_token, VECTOR)
    q0 = _load_query(q, head, c, inside, latent_head, VECTOR, dtype)
    q1 = _load_query(q + 128, head, c, inside, latent_head, VECTOR, dtype)
    q2 = _load_query(q + 256, head, c, inside, latent_head, VECTOR, dtype)
    q3 = _load_query(q + 384, head, c, inside, latent_head, VECTOR, dtype)
    if ROPE:
        q = rope + tl.multiple_of(token * rope_token, VECTOR)
        q_rope = _load_query(q, head, r, inside, rope_head, VECTOR, dtype)

    top = tl.full((BLOCK_H,), MASKED, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc0 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc1 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc2 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc3 = tl.zeros((BLOCK_H, 128), tl.float32)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        # Slots are read one step ahead: the gather's addresses must not wait for them.
        slot = following
        after = start + BLOCK_N + n
        following = tl.load(row_of_slots + after, mask=after < end, other=-1)
        valid = (slot >= 0) & (slot <= last_slot)
        if PAGED:
            offset = (slot // page).to(tl.int64) * block_stride
            offset += (slot % page).to(tl.int64) * token_stride
        else:
            offset = slot.to(tl.int64) * token_stride
        row = cache + tl.multiple_of(offset, VECTOR)
        k0 = _load_group(row, 0, valid, BLOCK_N, FP8, NATIVE)
        k1 = _load_group(row, 1, valid, BLOCK_N, FP8, NATIVE)
        k2 = _load_group(row, 2, valid, BLOCK_N, FP8, NATIVE)
        k3 = _load_group(row, 3, valid, BLOCK_N, FP8, NATIVE)
        scale0 = _group_scale(row, 0, valid, FP8)
        scale1 = _group_scale(row, 1, valid, FP8)
        scale2 = _group_scale(row, 2, valid, FP8)
        scale3 = _group_scale(row, 3, valid, FP8)

        scores = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
        if ROPE:
            rope_row = row + 512
            if FP8:
                rope_row = (row + 528).to(tl.pointer_type(tl.bfloat16))
            k_rope = tl.load(rope_row[:, None] + r[None, :], mask=valid[:, None], other=0.0)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores)
        scores = _add_scores(scores, k0, q0, scale0, FP8)
        scores = _add_scores(scores, k1, q1, scale1, FP8)
        scores = _add_scores(scores, k2, q2, scale2, FP8)
        scores = _add_scores(scores, k3, q3, scale3, FP8)

        scores = tl.where(valid[None, :], scores * scale, MASKED)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        top = new_top
        acc0 = _add_values(acc0, k0, weights, scale0, rescale, FP8)
        acc1 = _add_values(acc1, k1, weights, scale1, rescale, FP8)
        acc2 = _add_values(acc2, k2, weights, scale2, rescale, FP8)
        acc3 = _add_values(acc3, k3, weights, scale3, rescale, FP8)

    # Without a valid slot `top` stayed MASKED and every weight was exp2(0): nothing of it counts.
    live = top > 0.5 * MASKED
    factor = tl.where(live, 1.0 / total, 0.0)[:, None]
    log_sum = tl.where(live, top + tl.log2(total), float("-inf"))
    if SINGLE:
        to = out + token * out_token + (head * out_head)[:, None] + c[None, :]
        tl.store(lse + token * heads + head, log_sum * LN2, mask=inside)
    else:
        at = (token * splits + split) * heads + head
        to = partial + (at * 512)[:, None] + c[None, :]
        tl.store(partial_lse + at, log_sum, mask=inside)
    result = to.dtype.element_ty
    tl.store(to, (acc0 * factor).to(result), mask=inside[:, None])
    tl.store(to + 128, (acc1 * factor).to(result), mask=inside[:, None])
    tl.store(to + 256, (acc2 * factor).to(result), mask=inside[:, None])
    tl.store(to + 384, (acc3 * factor).to(result), mask=inside[:, None])
