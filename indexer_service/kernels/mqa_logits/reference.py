"""What `mqa_logits` means, in plain torch: the same bits on any machine and in any batch.

A score is computed in float64 and rounded once, to fp32 (decision record 0001):

1. Dot products are exact. An e4m3 value is a multiple of 2^-9 and at most 448, so a product is a
   multiple of 2^-18 and below 2^18, and a sum over D = 128 of them below 2^25: 43 bits, where
   float64 holds 53. No order of summation, no blocking, no number of threads can round it (true
   up to D = 2^17). The matrix product of any BLAS will do.
2. relu, the product with the head's weight, the sum over heads and the product with the key's
   scale round, but each is an element-wise operation, which IEEE 754 fixes to the bit. The sum
   over heads is a written-out tree of element-wise additions that depends on H alone.

Keys go through in tiles, so memory stays bounded at any context and a tile stays in cache.
"""

import torch
from torch import Tensor

from indexer_service.kernels.checks import E4M3
from indexer_service.kernels.k_cache.layout import read_pages
from indexer_service.kernels.lengths import row_lengths

TILE_BYTES = 1 << 20
"""No temporary is larger, or than one page of keys for one row where that is more."""

_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float64)


def paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
) -> None:
    """See `mqa_logits.paged`; arguments are checked, q is uint8, out's columns are the context."""
    batch, next_n, heads, dim = q.shape
    page, context = k_cache.shape[1], out.shape[1]
    lengths = row_lengths(seq_lens, next_n).to(torch.int64)
    none = torch.zeros_like(lengths)
    limit = min(context, block_table.shape[1] * page)
    longest = lengths.amax(1).clamp(0, limit).tolist() if batch else []
    tile_pages = max(1, _tile_keys(heads, dim) // page)

    for request, length in enumerate(longest):
        rows = slice(request * next_n, (request + 1) * next_n)
        for first in range(0, -(-length // page), tile_pages):
            begin, end = first * page, min((first + tile_pages) * page, length)
            page_ids = block_table[request, first : -(-end // page)]
            values, scales = read_pages(k_cache, page_ids)
            count = end - begin
            _score_tile(
                q[request], weights[rows], values[:count], scales[:count],
                none[request], lengths[request], begin, out[rows, begin:end],
            )  # fmt: skip
        out[rows, length:] = -torch.inf


def ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor,
) -> None:
    """See `mqa_logits.ragged`; arguments are checked, q and k are uint8."""
    _, heads, dim = q.shape
    starts = row_start.to(torch.int64).clamp(0, len(k))
    ends = row_end.to(torch.int64).clamp(0, len(k))
    out.fill_(-torch.inf)
    seeing = ends > starts
    if not bool(seeing.any()):
        return
    tile_keys = _tile_keys(heads, dim)
    last = int(ends[seeing].max())
    for begin in range(int(starts[seeing].min()), last, tile_keys):
        keys = slice(begin, min(begin + tile_keys, last))
        _score_tile(q, weights, k[keys], k_scale[keys], starts, ends, begin, out[:, keys])


def _tile_keys(heads: int, dim: int) -> int:
    """Keys whose float64 values, and whose float64 products with one row, fit a tile."""
    return max(1, TILE_BYTES // (8 * max(heads, dim)))


def _score_tile(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    starts: Tensor,
    ends: Tensor,
    first_key: int,
    out: Tensor,
) -> None:
    """Scores one tile of keys for all rows, a few rows at a time.

    Args:
        q: uint8 [R, H, D]; weights: fp32 [R, H]; k: uint8 [K, D]; k_scale: fp32 [K].
        starts, ends: int64 [R], the keys each row sees; `first_key` is the place of k[0].
        out: fp32 [R, K], written whole.
    """
    rows, heads, _ = q.shape
    keys = len(k)
    exact_k = _decode(k).T
    exact_scale = k_scale.to(torch.float64)
    place = torch.arange(first_key, first_key + keys, device=q.device)
    tile_rows = max(1, TILE_BYTES // (8 * heads * max(keys, k.shape[1])))
    for begin in range(0, rows, tile_rows):
        tile = slice(begin, begin + tile_rows)
        start, end = starts[tile].unsqueeze(1), ends[tile].unsqueeze(1)
        hidden = (place < start) | (place >= end)
        if bool(hidden.all()):
            out[tile] = -torch.inf
            continue
        dots = torch.matmul(_decode(q[tile]).flatten(0, 1), exact_k).unflatten(0, (-1, heads))
        dots.relu_().mul_(weights[tile].to(torch.float64).unsqueeze(2))
        scores = _sum_heads(dots).mul_(exact_scale).to(torch.float32)
        out[tile] = scores.masked_fill_(hidden, -torch.inf)


def _decode(codes: Tensor) -> Tensor:
    """e4m3 bytes -> float64. (A look-up is four times faster than torch's own conversion.)"""
    table = _E4M3_VALUES.to(codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _sum_heads(terms: Tensor) -> Tensor:
    """Sums float64 [R, H, K] over H by halving, in place: a tree fixed by H alone."""
    heads = terms.shape[1]
    while heads > 1:
        half = 1 << ((heads - 1).bit_length() - 1)  # H not a power of two: the rest has no partner
        terms[:, : heads - half] += terms[:, half:heads]
        heads = half
    return terms[:, 0]
