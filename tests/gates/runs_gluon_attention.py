"""What is run of the attention kernels in Gluon: SM90's forms against float64."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla import launch, plan
from tests.gates import runs_sparse_mla as inputs
from tests.gates.kernels import Run

_PAGES = 120
"""So that rows have blocks enough to fill the buffers more than once."""

_attend = partial(inputs.attend, arch="90", pages=_PAGES, tokens=2)


def _spread(buffers: int = 8, **case: Any) -> None:
    """One split of a few tokens on a large GPU."""
    with patch.object(plan, "_SPREAD_BUFFERS", buffers):
        _attend(invariant=True, splits=1, processors=1000, **case)


class _Partials:
    """In place of the merge: keeps what it would read."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._keep

    def _keep(self, out: Tensor, lse: Tensor, *partials: object, **constants: object) -> None:
        self.kept = [partial for partial in partials if isinstance(partial, Tensor)]


def _same_partials(kind: str, heads: int, tokens: int, k: int) -> None:
    """What is merged of a row is the same, however many programs share its splits.

    With more than 32 heads in bf16 few tokens have kernels of their own.
    """
    q = inputs.random(1, tokens, heads, 576).to(torch.bfloat16)
    cache, slots = inputs.cached(kind, 576, _PAGES), inputs.chosen_slots(tokens, k, _PAGES)

    def partials(some: slice, processors: int) -> list[Tensor]:
        kept = _Partials()
        with (
            patch.object(launch, "processors", lambda device: processors),
            patch.object(launch, "merge_kernel", kept),
        ):
            sparse_mla.attend(
                q[some], cache, slots[some], inputs.SCALE, batch_invariant=True, impl="triton"
            )
        return kept.kept

    alone = partials(slice(None), 1000)
    assert alone[0].shape[1] > 1
    for some, processors in ((slice(None), 1), (slice(1, 2), 1000)):
        ours = partials(some, processors)
        assert len(ours) == 2
        for mine, expected in zip(ours, alone, strict=True):
            assert torch.equal(mine, expected[some])


def _same_bits(kind: str, k: int) -> None:
    """A row's bits do not tell whether the merge merged its splits, or a program that had all."""
    q = inputs.random(1, 2, 1, 576).to(torch.bfloat16)
    cache, slots = inputs.cached(kind, 576, _PAGES), inputs.chosen_slots(3, k, _PAGES)[:2]

    def answers(processors: int) -> tuple[Tensor, Tensor]:
        with patch.object(launch, "processors", lambda device: processors):
            return sparse_mla.attend(
                q, cache, slots, inputs.SCALE, return_lse=True, batch_invariant=True, impl="triton"
            )

    for many, one in zip(answers(1000), answers(1), strict=True):
        assert torch.equal(many, one)


_CASES: dict[str, Callable[[], None]] = {
    "narrow, one buffer": partial(_attend, k=300, splits=1),
    "narrow, two buffers": partial(_attend, k=250, splits=1, processors=2),
    "narrow, split and merged": partial(_attend, k=100, splits=2, heads=2),
    "narrow, 32 heads": partial(_attend, k=100, splits=1, heads=17),
    "narrow, fp16 pair, pages apart": partial(
        _attend, "float16", k=70, splits=1, pair=True, paged=True
    ),
    "narrow, no rope part": partial(_attend, k=130, width=512, splits=1),
    "narrow, merged by the program": partial(_attend, k=300, invariant=True),
    "wide": partial(_attend, k=300, splits=1, heads=40, paged=True),
    "wide, no rope part": partial(_attend, k=200, splits=1, heads=33, width=512),
    "spread": partial(_spread, k=130, heads=40, paged=True),
    "spread, two blocks in flight": partial(_spread, 2, k=250, heads=64),
    "spread, no rope part": partial(_spread, k=50, heads=33, width=512),
    "fp8, 16 heads": partial(_attend, "fp8", k=200, splits=1),
    "fp8, split and merged": partial(_attend, "fp8", k=100, splits=2, heads=2),
    "fp8, 32 heads": partial(_attend, "fp8", k=200, splits=1, heads=20),
    "fp8, 64 heads": partial(_attend, "fp8", k=200, splits=1, heads=64, paged=True),
    "fp8, merged by the program": partial(_attend, "fp8", k=200, invariant=True),
    "the same bits, narrow": partial(_same_bits, "bfloat16", 130),
    "the same bits, fp8": partial(_same_bits, "fp8", 130),
    "the same parts, wide": partial(_same_partials, "bfloat16", 64, 2, 100),
    "the same parts, fp8": partial(_same_partials, "fp8", 20, 2, 100),
}

RUNS = [Run(f"sparse_mla in Gluon, {name}", check) for name, check in _CASES.items()]
