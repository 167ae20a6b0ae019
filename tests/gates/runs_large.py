"""What is interpreted at sizes where 32-bit arithmetic would fail or a fixed buffer would end.

The cache's memory is taken but never touched, except for the pages in use, so it costs nothing.
"""

import torch

from indexer_service.kernels import indexer, k_cache, topk
from tests.gates.kernels import Run
from tests.kernels import inputs

_PAGE, _DIM = 64, 128
_PAGE_BYTES = _PAGE * (_DIM + 4)
_FIRST_FAR_PAGE = 2**31 // _PAGE_BYTES + 1


def _row_of_a_million() -> None:
    scores = torch.rand((1, 2**20), generator=torch.Generator().manual_seed(3))
    scores[0, ::7] = scores[0, 7].clone()  # ties of 150,000 scores
    expected = topk.select(scores, 2048, impl="reference")
    assert torch.equal(topk.select(scores, 2048, impl="triton"), expected)


def _pages_beyond_2_31() -> None:
    """Elements and bytes: the cache is one of uint8."""
    near = inputs.paged([300, 77], heads=16, dim=_DIM, page=_PAGE)
    pages = len(near.k_cache)
    far = torch.empty((_FIRST_FAR_PAGE + pages, _PAGE, _DIM + 4), dtype=torch.uint8)
    far[:pages] = 0  # where an offset that wrapped would read
    far[_FIRST_FAR_PAGE:] = near.k_cache
    table = near.block_table + _FIRST_FAR_PAGE
    ours = indexer.select_paged(near.q, far, near.weights, near.seq_lens, table, 40, impl="triton")
    assert torch.equal(ours, indexer.select_paged(*near.tensors, 40, impl="reference"))

    lengths = near.seq_lens
    ours_keys = k_cache.gather(far, table, lengths, impl="triton")
    keys = k_cache.gather(near.k_cache, near.block_table, lengths, impl="reference")
    for ours_part, part in zip(ours_keys, keys, strict=True):
        assert torch.equal(ours_part.view(torch.uint8), part.view(torch.uint8))

    slots = torch.tensor([3, 70, 129])
    new = torch.randn((3, _DIM), generator=torch.Generator().manual_seed(4)).bfloat16()
    k_cache.insert(new, slots, near.k_cache, impl="reference")
    k_cache.insert(new, slots + _FIRST_FAR_PAGE * _PAGE, far, impl="triton")
    assert torch.equal(far[_FIRST_FAR_PAGE:], near.k_cache)


RUNS = [
    Run("top-k: a row of a million", _row_of_a_million),
    Run("pages beyond 2^31", _pages_beyond_2_31),
]
