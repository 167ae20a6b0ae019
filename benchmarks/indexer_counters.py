"""What bounds the indexer's kernels: Nsight Compute's counters (`counters.py`).

python benchmarks/indexer_counters.py        on a CUDA machine that has ncu
"""

from collections.abc import Callable
from functools import partial

import indexer_peers as peers
import torch
from counters import Workloads, main
from indexer_inputs import DEVICE, Decode, Pool, Prefill, form, normal
from indexer_rows import FORMS

from indexer_service.kernels import indexer, mqa_logits, topk

K, K4, K64 = 2048, 1 << 12, 1 << 16
_POOL_PAGES = 1 << 16

Call = Callable[[], object]


def _decode(heads: int, batch: int, next_n: int, context: int) -> Decode:
    return Decode(heads, batch, context, context, 1, Pool(_POOL_PAGES), next_n)


def _select(arch: str | None, *shape: int) -> Call:
    inputs = _decode(*shape)
    out = torch.empty((inputs.rows, K), dtype=torch.int32, device=DEVICE)

    def call() -> None:
        with form(arch):
            indexer.select_paged(*inputs.arguments(0), K, out=out, impl="triton")

    return call


def _peers(*shape: int) -> Call:
    inputs = _decode(*shape)
    logits = peers.paged_logits(inputs)
    best = peers.persistent(inputs.row_lengths, K, inputs.context)
    return lambda: best(logits(0))


def _ragged(arch: str | None) -> Call:
    inputs = Prefill(64, K4, K64)
    scores = torch.empty((K4, K64), device=DEVICE)

    def call() -> None:
        with form(arch):
            mqa_logits.ragged(*inputs.arguments(), out=scores, impl="triton")

    return call


def _topk() -> Call:
    inputs, scores = Prefill(8, K4, K64), normal(K4, K64) * 4
    return lambda: topk.select(scores, K, inputs.row_start, inputs.row_end, impl="triton")


SHAPES = [(64, 64, 1, K4), (64, 8, 1, K64), (64, 64, 1, K64), (32, 64, 1, K64), (64, 32, 2, K64)]
"""Heads, requests, rows of each, and context."""

WORKLOADS: Workloads = {
    **{
        f"select {name} {'x'.join(map(str, shape))}": partial(_select, arch, *shape)
        for shape in SHAPES
        for name, arch in FORMS.items()
    },
    **{f"peers {'x'.join(map(str, shape))}": partial(_peers, *shape) for shape in SHAPES},
    **{f"ragged {name} 64x4096x65536": partial(_ragged, arch) for name, arch in FORMS.items()},
    "top-k 4096x65536": _topk,
}

if __name__ == "__main__":
    main(__file__, "indexer_counters", WORKLOADS)
