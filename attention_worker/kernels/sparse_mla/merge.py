"""The splits of a token made one: softmax-weighted sum of their outputs."""

import triton
import triton.language as tl

from attention_worker.kernels.sparse_mla.split import LN2


@triton.jit(
    do_not_specialize=("heads", "splits", "out_token", "out_head"),
    do_not_specialize_on_alignment=("lse",),
)
def merge_kernel(
    out, lse, partial, partial_lse, heads, splits, out_token: tl.int64, out_head: tl.int64,
    MAX_SPLITS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token, one head, COLUMNS of its 512 values; splits are summed in their order.

    partial [T, splits, N, 512], partial_lse fp32 [T, splits, N] base 2, -inf where a split
    had no valid slot -> out [T, N, 512], lse fp32 [T, N] natural.
    """
    program = tl.program_id(0)
    part = tl.program_id(1)
    token = (program // heads).to(tl.int64)
    head = program % heads
    split = tl.arange(0, MAX_SPLITS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    at = (token * splits + split) * heads + head
    there = split < splits
    if PDL:
        tl.extra.cuda.gdc_wait()
    log_sums = tl.load(partial_lse + at, mask=there, other=float("-inf"))
    values = tl.load(
        partial + at[:, None] * 512 + column[None, :], mask=there[:, None], other=0.0
    ).to(tl.float32)
    top = tl.max(log_sums, 0)
    live = top > float("-inf")
    top = tl.where(live, top, 0.0)
    weights = tl.exp2(log_sums - top)
    total = tl.sum(weights, 0)
    merged = tl.sum(values * weights[:, None], 0) / tl.where(live, total, 1.0)
    to = out + token * out_token + head * out_head
    tl.store(to + column, merged.to(out.dtype.element_ty))
    if part == 0:
        tl.store(lse + token * heads + head, (top + tl.log2(total)) * LN2)
