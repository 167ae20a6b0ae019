"""What is interpreted of the rescue behind a wait: what select_paged selects, or nothing."""

from functools import partial

import torch

from indexer_service.kernels import indexer
from indexer_service.kernels.indexer.rescue import rescue
from tests.gates.kernels import Run
from tests.kernels import inputs


def _same(lengths: list[int], next_n: int, heads: int, k: int) -> None:
    case = inputs.paged(lengths, next_n=next_n, heads=heads, dim=64, page=64)
    expected = torch.full((len(lengths) * next_n, k), 77, dtype=torch.int32)
    indexer.select_paged(*case.tensors, k, out=expected, impl="triton")
    on, off = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out = torch.full_like(expected, 78)
    rescue(*case.tensors, k, out=out, enabled=off)
    assert (out == 78).all()
    rescue(*case.tensors, k, out=out, enabled=on)
    assert torch.equal(out, expected)


_CASES = {
    "a row a request": partial(_same, [300, 0, 33, 512, 1], 1, 16, 40),
    "three rows a request": partial(_same, [130, 2, 0], 3, 16, 40),
    "more indices than keys": partial(_same, [90], 2, 64, 128),
}

RUNS = [Run(f"rescue, {name}", check) for name, check in _CASES.items()]
