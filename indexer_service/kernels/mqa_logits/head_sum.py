"""A score's last step, from a row's heads to one number: a device function of both kernels.

Keys are the long side of the matrix product and heads the short one, and no tile splits a key's
heads among warps. So the order in which the heads are summed depends on their number alone, and
not on the tile's size.
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
