"""The splits of a token made one: softmax-weighted sum of their outputs."""

import triton
import triton.language as tl

from attention_worker.kernels.sparse_mla.split import LN2, MASKED


@triton.jit
def fold(top, total, log_sum):
    """One split more merged.

    Largest logarithm so far, sum of weights relative to it, the split's logarithm (MASKED without
    a valid slot) -> the first two with the split, factor of what was merged before, weight of the
    split.
    """
    new_top = tl.maximum(top, log_sum)
    before = tl.exp2(top - new_top)
    weight = tl.exp2(log_sum - new_top)
    return new_top, tl.fma(total, before, weight), before, weight


@triton.jit
def _together(
    partial, partial_lse, first, heads, splits, column, MAX_SPLITS: tl.constexpr
):  # fmt: skip
    """All splits at once, summed as the compiler likes."""
    split = tl.arange(0, MAX_SPLITS)
    at = first + split * heads
    there = split < splits
    log_sums = tl.load(partial_lse + at, mask=there, other=float("-inf"))
    values = tl.load(
        partial + at[:, None] * 512 + column[None, :], mask=there[:, None], other=0.0
    ).to(tl.float32)
    top = tl.maximum(tl.max(log_sums, 0), MASKED)
    weights = tl.exp2(log_sums - top)
    return top, tl.sum(weights, 0), tl.sum(values * weights[:, None], 0)


@triton.jit
def _one_by_one(
    partial, partial_lse, first, heads, splits, column, MAX_SPLITS: tl.constexpr
):  # fmt: skip
    """In the order, and with the arithmetic, of a program that has all splits (`hopper.fold`)."""
    # Where there is no split, the last one is read again and weighs nothing.
    log_sums = ()
    values = ()
    largest = MASKED
    for split in tl.static_range(MAX_SPLITS):
        at = first + tl.minimum(split, splits - 1) * heads
        log_sum = tl.load(partial_lse + at)
        log_sum = tl.maximum(tl.where(split < splits, log_sum, MASKED), MASKED)
        largest = tl.maximum(largest, log_sum)
        log_sums += (log_sum,)  # type: ignore[assignment]
        values += (tl.load(partial + at * 512 + column),)  # type: ignore[assignment]
    # MASKED, but not before everything was asked for: one latency instead of one a split.
    top = tl.minimum(largest, MASKED)
    total = 0.0
    merged = tl.zeros_like(column).to(tl.float32)
    for split in tl.static_range(MAX_SPLITS):
        top, total, before, weight = fold(top, total, log_sums[split])
        merged = tl.fma(values[split].to(tl.float32), weight, merged * before)
    return top, total, merged


@triton.jit(
    do_not_specialize=("heads", "splits", "out_token", "out_head"),
    do_not_specialize_on_alignment=("lse",),
)
def merge_kernel(
    out, lse, partial, partial_lse, heads, splits, out_token: tl.int64, out_head: tl.int64,
    MAX_SPLITS: tl.constexpr, COLUMNS: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token, one head, COLUMNS of its 512 values.

    partial [T, splits, N, 512], partial_lse fp32 [T, splits, N] base 2, -inf where a split
    had no valid slot -> out [T, N, 512], lse fp32 [T, N] natural. IN_ORDER: the bits do not
    depend on whether splits were merged here.
    """
    program = tl.program_id(0)
    part = tl.program_id(1)
    token = (program // heads).to(tl.int64)
    head = program % heads
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    first = token * splits * heads + head
    if PDL:
        tl.extra.cuda.gdc_wait()
    if IN_ORDER:
        top, total, merged = _one_by_one(
            partial, partial_lse, first, heads, splits, column, MAX_SPLITS
        )
    else:
        top, total, merged = _together(
            partial, partial_lse, first, heads, splits, column, MAX_SPLITS
        )
    live = top > 0.5 * MASKED
    factor = tl.where(live, 1.0 / total, 0.0)
    to = out + token * out_token + head * out_head
    tl.store(to + column, (merged * factor).to(out.dtype.element_ty))
    if part == 0:
        log_sum = tl.where(live, top + tl.log2(total), float("-inf"))
        tl.store(lse + token * heads + head, log_sum * LN2)
