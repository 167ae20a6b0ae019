"""What is interpreted of the fused indexer: the same selection as logits, then top-k."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from indexer_service.kernels import indexer, mqa_logits, topk
from indexer_service.kernels.nan_seen import NanSeen, row_of
from tests.gates.kernels import Run
from tests.kernels import inputs

LENGTHS = [300, 0, 33, 512, 1]
_NAN_CODE = 0x7F


def _paged(next_n: int = 1, workspace: int | None = None, lengths: list[int] = LENGTHS) -> None:
    case = inputs.paged(lengths, next_n=next_n, heads=16, dim=64, page=64)
    scores = mqa_logits.paged(*case.tensors, max(lengths), impl="triton")
    expected = topk.select(scores, 40, impl="reference")
    out = torch.full_like(expected, 77)
    indexer.select_paged(*case.tensors, 40, out=out, workspace=workspace, impl="triton")
    assert torch.equal(out, expected)


def _ragged(workspace: int | None = None) -> None:
    case = inputs.ragged([(0, 300), (10, 200), (30, 20), (299, 400)], 300, heads=16, dim=64)
    scores = mqa_logits.ragged(*case.tensors, impl="triton")
    expected = topk.select(scores, 40, case.row_start, case.row_end, impl="reference")
    ours = indexer.select_ragged(*case.tensors, 40, workspace=workspace, impl="triton")
    assert torch.equal(ours, expected)


def _disabled() -> None:
    off = torch.zeros(1, dtype=torch.int32)
    paged = inputs.paged([90, 70], heads=16, dim=64, page=64)
    ragged = inputs.ragged([(0, 90), (5, 70)], 90, heads=16, dim=64)
    out = torch.full((2, 8), 77, dtype=torch.int32)
    indexer.select_paged(*paged.tensors, 8, out=out, enabled=off, impl="triton")
    indexer.select_ragged(*ragged.tensors, 8, out=out, enabled=off, impl="triton")
    assert (out == 77).all()


def _settled() -> None:
    """As without it, on and off, also in windows of keys."""
    case = inputs.paged(LENGTHS, heads=16, dim=64, page=64)
    expected = indexer.select_paged(*case.tensors, 40, impl="triton")
    for workspace in (None, 1):
        for on in (0, 1):
            enabled = torch.full((1,), on, dtype=torch.int32)
            out = torch.full_like(expected, 77)
            indexer.select_paged(
                *case.tensors, 40, out=out, workspace=workspace, enabled=enabled, settled=True,
                impl="triton",
            )  # fmt: skip
            assert torch.equal(out, expected) if on else (out == 77).all()
    assert torch.equal(
        indexer.select_paged(*case.tensors, 40, settled=True, impl="triton"), expected
    )


def _first_nan(select: Callable[..., Tensor], case: Any, workspace: int, windows: int) -> None:
    """The row is counted from the step's first one, whichever window it is in."""
    case.q.view(torch.uint8).view(3, -1)[2, 0] = _NAN_CODE
    word, stages = torch.zeros(1, dtype=torch.int32), list[str]()
    select(
        *case.tensors, 8, workspace=workspace, nan=NanSeen(word, 4), on_stage=stages.append,
        impl="triton",
    )  # fmt: skip
    assert row_of(int(word)) == 4 + 2
    assert stages.count("topk") == windows, stages


def _first_paged_nan(workspace: int, windows: int) -> None:
    case = inputs.paged([90, 1, 70], heads=16, dim=64, page=64)
    _first_nan(indexer.select_paged, case, workspace, windows)


def _first_ragged_nan(workspace: int, windows: int) -> None:
    case = inputs.ragged([(0, 90), (5, 70), (9, 90)], 90, heads=16, dim=64)
    _first_nan(indexer.select_ragged, case, workspace, windows)


_CASES: dict[str, Callable[[], None]] = {
    "paged": _paged,
    "paged, two rows a request": partial(_paged, next_n=2),
    "paged, in windows of a few requests": partial(_paged, workspace=16_000),
    "paged, in windows of keys": partial(_paged, workspace=1, lengths=[200, 0]),
    "ragged": _ragged,
    "ragged, a row at a time": partial(_ragged, workspace=10_000),
    "the first NaN, paged, in windows of a few requests": partial(_first_paged_nan, 1200, 2),
    "the first NaN, paged, in windows of keys": partial(_first_paged_nan, 1, 5),
    "the first NaN, ragged, a row at a time": partial(_first_ragged_nan, 900, 3),
    "disabled": _disabled,
    "enabled or not, and settled": _settled,
}

RUNS = [Run(f"indexer {name}", check) for name, check in _CASES.items()]
