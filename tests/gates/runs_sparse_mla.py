"""What is interpreted of sparse_mla: each form against float64, on small inputs."""

import os
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla import launch
from attention_worker.kernels.sparse_mla.layout import decode_tokens
from tests.gates.kernels import Run
from tests.kernels import naive

SCALE = 576**-0.5
PAGE, PAGES = 4, 24


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cached(kind: str, width: int, pages: int = PAGES) -> Tensor:
    """[pages, PAGE, width] of random tokens; a third of them NaN, and never to be referred to."""
    tokens = pages * PAGE
    if kind == "fp8":
        source = torch.Generator().manual_seed(3)
        codes = torch.randint(0, 256, (tokens, 512), generator=source, dtype=torch.uint8)
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
        scales = random(4, tokens, 4).abs() * 0.01 + 1e-4
        rope = random(5, tokens, 64).to(torch.bfloat16)
        scales[::3], rope[::3] = torch.nan, torch.nan
        parts = [codes, scales.view(torch.uint8), rope.view(torch.uint8)]
        return torch.cat(parts, 1).view(pages, PAGE, 656)
    values = random(2, tokens, width).to(getattr(torch, kind))
    values[::3] = torch.nan
    return values.view(pages, PAGE, width)


def chosen_slots(tokens: int, k: int, pages: int = PAGES) -> Tensor:
    """Rows of slots that are not multiples of 3, with holes; the last row has none at all."""
    good = torch.tensor([slot for slot in range(pages * PAGE) if slot % 3])
    rows = []
    for row in range(tokens):
        order = torch.randperm(len(good), generator=torch.Generator().manual_seed(row))
        rows.append(good[order[:k]])
    slots = torch.stack(rows).to(torch.int32)
    slots[:, 1::7] = -1
    slots[0, 3], slots[0, 4] = pages * PAGE, 2**31 - 1
    slots[-1] = -1
    return slots


def _same(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert torch.equal(ours.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    difference = (ours.double() - expected.double())[finite].norm()
    relative = float(difference / expected.double()[finite].norm())
    assert relative <= tolerance, f"relative error {relative:.2e}"


def attend(
    kind: str = "bfloat16", heads: int = 3, width: int = 576, splits: int | None = None,
    arch: str = "89", k: int = 43, paged: bool = False, pair: bool = False, tokens: int = 3,
    pages: int = PAGES, invariant: bool = False, processors: int = 1,
) -> None:  # fmt: skip
    """Attention of random tokens, the last of which has no slot, against float64."""
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    q = random(1, tokens, heads, width).to(dtype)
    cache = cached(kind, width, pages)
    if paged:
        room = torch.full((pages, 2, PAGE, cache.shape[2] + 16), 9, dtype=cache.dtype)
        room[:, 1, :, : cache.shape[2]] = cache
        cache = room[:, 1, :, : cache.shape[2]]
    query: Tensor | tuple[Tensor, Tensor] = q
    if pair:
        query = (q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), q[..., 512:])
    slots = chosen_slots(tokens, k, pages)
    os.environ["DSA_INDEXER_FORCE_ARCH"] = arch
    room_out = torch.zeros((tokens, heads + 1, 512), dtype=dtype)
    with patch.object(launch, "processors", lambda device: processors):
        ours, lse = sparse_mla.attend(
            query, cache, slots, SCALE, return_lse=True, num_kv_splits=splits, impl="triton",
            out=room_out[:, 1:], batch_invariant=invariant,
        )  # fmt: skip
    decoded = decode_tokens(cache.reshape(-1, cache.shape[2]))
    rows = [
        naive.attention(one, decoded, row, SCALE)
        for one, row in zip(q, slots.tolist(), strict=True)
    ]
    expected, expected_lse = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    assert (room_out[:, 0] == 0).all()
    _same(ours, expected, 4e-3)
    _same(lse, expected_lse, 1e-5)
    assert (ours[-1] == 0).all()


def _nan_code(arch: str) -> None:
    """A row that attends to a NaN code is NaN, and the others are not."""
    q, cache, slots = (
        random(1, 3, 3, 576).to(torch.bfloat16),
        cached("fp8", 576),
        chosen_slots(3, 43),
    )
    place = int(slots[1, 0])
    slots[0] = torch.where(slots[0] == place, -1, slots[0])
    cache.view(-1, 656)[place, 200] = 0xFF
    os.environ["DSA_INDEXER_FORCE_ARCH"] = arch
    for splits in (1, 2):
        ours = sparse_mla.attend(q, cache, slots, SCALE, num_kv_splits=splits, impl="triton")
        assert not ours[1].isfinite().any()
        assert ours[0].isfinite().all()
        assert ours[2].isfinite().all()


def _to_slots() -> None:
    indices = torch.tensor([[0, 5, -1, 7], [9, 8, -2, 3], [1, 2, 3, 0]], dtype=torch.int32)
    wide = torch.zeros((3, 8), dtype=torch.int32)
    wide[:, ::2] = indices
    table = torch.tensor([[5, 2], [0, 9]], dtype=torch.int32)
    arguments = (torch.tensor([0, 1, 2], dtype=torch.int32), table, PAGE)
    for pages in (None, 6):
        counts = [torch.full((1,), 3, dtype=torch.int32) for _ in range(2)]
        answers = [
            sparse_mla.to_slots(
                wide[:, ::2], *arguments, pages=pages, invalid_count=count, impl=impl
            )
            for impl, count in zip(("triton", "reference"), counts, strict=True)
        ]
        assert torch.equal(*answers)
        assert torch.equal(*counts)


_CASES: dict[str, Callable[[], None]] = {
    "bf16 one pass": partial(attend, splits=1),
    "bf16 split and merged": partial(attend, splits=2, heads=17),
    "bf16 pair of queries, pages apart": partial(attend, splits=1, pair=True, paged=True),
    "fp16": partial(attend, "float16", splits=1),
    "no rope part": partial(attend, width=512, splits=1),
    "fp8 native": partial(attend, "fp8", splits=2),
    "fp8 software": partial(attend, "fp8", splits=1, arch="80"),
    "fp8 pages apart": partial(attend, "fp8", splits=1, paged=True),
    "fp8 NaN code, native": partial(_nan_code, "89"),
    "fp8 NaN code, software": partial(_nan_code, "80"),
    "fewer slots than a block": partial(attend, k=5),
    "to_slots": _to_slots,
}

RUNS = [Run(f"sparse_mla {name}", check) for name, check in _CASES.items()]
