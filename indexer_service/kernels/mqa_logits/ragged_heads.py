"""From a key's products with a row's heads to its score: a device function of both ragged kernels.

The paged kernels round in another order (`paged_heads.py`).

Keys are the long side of the matrix product and heads the short one. A thread sums its heads of a
key in their order, then the four threads that share the key join their sums; so the order depends
on the number of heads alone, and not on the tile.

Which product is fused into which addition is settled before the assembler sees them: the first
two terms become w0 * t0 + (w1 * t1), rounded once more, and every further one is a fused multiply
and add (`fma.rn` in the PTX of every configuration), so that nothing is left for it to choose. A
test compares all configurations, of this kernel and of the one for SM90, bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def sum_heads(products, weights, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """sum over h of weights[r, h] * relu(products[key, r, h]); a NaN stays one.

    products: fp32 [keys, ROWS * HEADS]; weights: fp32 [ROWS * HEADS] -> fp32 [keys, ROWS].
    """
    terms = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    return tl.sum(tl.reshape(terms, (products.shape[0], ROWS, HEADS)), 2)
