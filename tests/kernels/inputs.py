"""Random inputs of the indexer's kernels, from a seed."""

from dataclasses import dataclass

import torch
from torch import Tensor


def codes(seed: torch.Generator, *shape: int) -> Tensor:
    """Random e4m3 bytes of every kind but NaN."""
    drawn = torch.randint(0, 256, shape, generator=seed, dtype=torch.uint8)
    return torch.where((drawn & 0x7F) == 0x7F, drawn - 1, drawn)


def k_cache(seed: torch.Generator, pages: int, page: int, dim: int) -> Tensor:
    """uint8 [pages, page, dim+4]: random planar pages with power-of-two scales."""
    values = codes(seed, pages, page * dim)
    exponents = torch.randint(-6, 3, (pages, page), generator=seed)
    scales = torch.exp2(exponents.to(torch.float32)).view(torch.uint8)
    return torch.cat([values, scales.view(pages, page * 4)], dim=1).view(pages, page, dim + 4)


@dataclass
class Paged:
    """Arguments of `mqa_logits.paged` and `indexer.select_paged`."""

    q: Tensor
    k_cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k_cache, self.weights, self.seq_lens, self.block_table


def paged(
    lengths: list[int],
    *,
    next_n: int = 1,
    heads: int = 8,
    dim: int = 32,
    page: int = 16,
    seed: int = 0,
) -> Paged:
    """A batch of requests with these lengths (after their last row), pages in random order."""
    source = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    columns = max(1, -(-max(lengths, default=0) // page))
    shuffled = torch.randperm(batch * columns, generator=source)
    return Paged(
        q=codes(source, batch, next_n, heads, dim),
        k_cache=k_cache(source, max(1, batch * columns), page, dim),
        weights=torch.randn((batch * next_n, heads), generator=source),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=shuffled.view(batch, columns).to(torch.int32),
    )


@dataclass
class Ragged:
    """Arguments of `mqa_logits.ragged` and `indexer.select_ragged`."""

    q: Tensor
    k: Tensor
    k_scale: Tensor
    weights: Tensor
    row_start: Tensor
    row_end: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.k_scale, self.weights, self.row_start, self.row_end


def ragged(
    bounds: list[tuple[int, int]], keys: int, *, heads: int = 8, dim: int = 32, seed: int = 0
) -> Ragged:
    """Rows with these bounds over so many keys."""
    source = torch.Generator().manual_seed(seed)
    return Ragged(
        q=codes(source, len(bounds), heads, dim),
        k=codes(source, keys, dim),
        k_scale=torch.exp2(torch.randint(-6, 3, (keys,), generator=source).to(torch.float32)),
        weights=torch.randn((len(bounds), heads), generator=source),
        row_start=torch.tensor([start for start, _ in bounds], dtype=torch.int32),
        row_end=torch.tensor([end for _, end in bounds], dtype=torch.int32),
    )


def inside_larger_rows(out: Tensor, fill: float | int) -> tuple[Tensor, Tensor]:
    """A view of out's shape and type within a larger tensor full of `fill`, and that tensor."""
    rows, columns = out.shape
    larger = torch.full((rows, columns + 5), fill, dtype=out.dtype)
    return larger[:, 2 : 2 + columns], larger
