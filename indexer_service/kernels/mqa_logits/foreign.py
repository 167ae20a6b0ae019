"""What other projects' kernels need around them to keep the promises of `mqa_logits`.

They trust lengths and page numbers, so they get copies in which both are in range. They leave what
lies past a row's length undefined and do not know pages outside the cache: `finish` writes both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from indexer_service.kernels.lengths import row_lengths

_COLUMNS = 4
"""Kernels may read a table so many columns at a time: its copy is padded to a multiple."""


@dataclass(frozen=True)
class InRange:
    """Attributes:
    lengths: int32 [B, next_n], 0 to the columns that exist.
    block_table: int32 [B, n], a copy, contiguous; page 0 stands for every page outside the cache.
    outside: bool [B, columns of the caller's table], where that is so.
    page: tokens of a page.
    """

    lengths: Tensor
    block_table: Tensor
    outside: Tensor
    page: int

    def finish(self, scores: Tensor, out: Tensor) -> None:
        """Copy fp32 scores [B*next_n, >= width] to `out`: NaN for keys of a page outside the
        cache, -inf past each row's length."""
        next_n, width = self.lengths.shape[1], out.shape[1]
        outside = self.outside.repeat_interleave(self.page, 1)[:, :width]
        covered = outside.shape[1]
        out.copy_(scores[:, :width])
        out[:, :covered].masked_fill_(outside.repeat_interleave(next_n, 0), torch.nan)
        column = torch.arange(width, dtype=torch.int32, device=out.device)
        out.masked_fill_(column >= self.lengths.reshape(-1, 1), -torch.inf)


def in_range(
    k_cache: Tensor, seq_lens: Tensor, block_table: Tensor, next_n: int, width: int
) -> InRange:
    """Copies of a call's lengths and pages that no kernel can go astray with.

    Args:
        k_cache, seq_lens, block_table: as `mqa_logits.paged` takes them.
        width: columns of its result.
    """
    pages, page, _ = k_cache.shape
    columns = block_table.shape[1]
    lengths = row_lengths(seq_lens, next_n).clamp(0, min(width, columns * page))
    outside = (block_table < 0) | (block_table >= pages)
    padding = -columns % _COLUMNS
    safe = torch.nn.functional.pad(block_table.masked_fill(outside, 0), (0, padding))
    return InRange(lengths, safe.contiguous(), outside, page)
