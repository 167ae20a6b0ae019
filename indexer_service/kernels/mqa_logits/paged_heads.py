"""From a key's products with a row's heads to its score: a device function of both paged kernels.

Every rounding is written out. A sum of products would be left to the assembler, which may fuse
either of the first two products into the addition, and does not choose the same in every kernel.
"""

import triton
import triton.language as tl


@triton.jit
def twice_weighted_sum(products, weights, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Twice the sum over heads of weights * relu(products); a NaN stays one.

    products: fp32 [keys, ROWS * HEADS]; weights: fp32 [ROWS * HEADS] -> fp32 [keys, ROWS].
    x + |x| is twice relu, exactly, and cheaper than a maximum that keeps NaN.
    """
    KEYS: tl.constexpr = products.shape[0]
    weights = tl.broadcast_to(weights[None, :], (KEYS, ROWS * HEADS))
    twice = products + tl.abs(products)
    even, odd = tl.split(tl.reshape(twice, (KEYS, ROWS, HEADS // 2, 2)))
    even_weight, odd_weight = tl.split(tl.reshape(weights, (KEYS, ROWS, HEADS // 2, 2)))
    return tl.sum(tl.fma(even, even_weight, odd * odd_weight), 2)
