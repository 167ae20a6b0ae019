"""Faults that other indexers had (`peer_faults.py`), on the CPU and on a GPU."""

from collections.abc import Callable

import pytest
import torch

from indexer_service.kernels import k_cache
from tests.kernels import inputs
from tests.kernels.peer_faults import CHECKS, Where


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(Where("cpu", "reference"), id="reference"),
        pytest.param(Where("cuda", "triton"), id="triton", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fault_of_others(check: Callable[[Where], None], where: Where) -> None:
    check(where)


def test_an_indexer_cache_shorter_than_the_length() -> None:
    """S/31108: 4096 tokens, 4032 of them with index keys; stale keys were read."""
    case = inputs.paged([4032], heads=2, dim=16, page=64)
    with pytest.raises(ValueError, match=r"^seq_lens: length 4096, .* 4032 .*\(fix: "):
        k_cache.gather(case.k_cache, case.block_table, torch.tensor([4096], dtype=torch.int32))
