"""What is interpreted of the paged logits: both forms against the reference, on small inputs."""

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from indexer_service.kernels.lengths import row_lengths
from indexer_service.kernels.mqa_logits import paged_launch, reference
from indexer_service.kernels.mqa_logits.packed import PackedScores, padded, windows
from indexer_service.kernels.mqa_logits.paged_plan import Configuration
from tests.gates.kernels import Run
from tests.kernels import inputs

TOLERANCE = 5e-4
POISON = 77.0


def same(ours: Tensor, expected: Tensor) -> None:
    """Equal masks of NaN and -inf, and small relative error in norm elsewhere."""
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isneginf(), expected.isneginf())
    seen = expected.isfinite()
    error = (ours.double() - expected.double())[seen].norm()
    relative = float(error / expected.double()[seen].norm().clamp_min(1e-30))
    assert relative <= TOLERANCE, f"relative error {relative:.2e}"


_KERNELS = {
    "portable": partial(Configuration, "portable", 64, 4, 2),
    "hopper": partial(Configuration, "hopper", 64, 4, 3),
}
"""As few keys a tile as may be; the number of programs is left open."""


def scored(
    case: inputs.Paged, context: int, programs: int = 3, kernel: str = "portable"
) -> tuple[Tensor, Tensor]:
    """Our scores and the reference's, each within larger rows that nothing else may touch."""
    rows = len(case.weights)
    larger = torch.full((rows, context + 9), POISON)
    ours, expected = larger[:, 4 : 4 + context], torch.empty((rows, context))
    paged_launch.paged(*case.tensors, ours, configuration=_KERNELS[kernel](programs))
    reference.paged(*case.tensors, expected)
    assert (larger[:, :4] == POISON).all()
    assert (larger[:, 4 + context :] == POISON).all()
    return ours, expected


def packed_rows(
    case: inputs.Paged,
    context: int,
    scores: int,
    limit: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Scores of all windows as dense rows, -inf past each row's end; checks the layout."""
    batch, next_n = case.q.shape[:2]
    rows = batch * next_n
    limit = context if limit is None else limit
    result = torch.full((rows, context), -torch.inf)
    ends = row_lengths(case.seq_lens, next_n).flatten().clamp(0, limit)
    held = torch.zeros(rows, dtype=torch.int32)
    chosen = None if kernel is None else _KERNELS[kernel](3)
    for window in range(windows(batch, next_n, limit, scores)):
        packed = PackedScores(
            torch.full((scores,), POISON), torch.full((rows,), -7),
            torch.full((rows,), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32),
        )  # fmt: skip
        paged_launch.paged_packed(
            *case.tensors, packed, limit=limit, window=window, configuration=chosen
        )
        assert torch.equal(packed.row_end, ends.to(torch.int32))
        assert (packed.arrived == 0).all()
        places = set()
        for row, (at, end) in enumerate(zip(packed.row_at.tolist(), ends.tolist(), strict=True)):
            if at >= 0:
                held[row] += 1
                result[row, :end] = packed.scores[at : at + end]
                places |= set(range(at, at + padded(end)))
        outside = torch.tensor([at not in places for at in range(scores)])
        longest = row_lengths(case.seq_lens, next_n).amax(1)
        if next_n == 1 or int(longest.max()) <= 0:
            assert (packed.scores[outside] == POISON).all()
    assert (held == 1).all()
    return result


def _dense(
    *, arch: str, next_n: int = 1, heads: int = 16, page: int = 64, dim: int = 128,
    lengths: tuple[int, ...] = (100, 37, 0, -3, 130),
    change: Callable[[inputs.Paged], None] = lambda case: None, kernel: str = "portable",
) -> None:  # fmt: skip
    os.environ["DSA_INDEXER_FORCE_ARCH"] = arch
    case = inputs.paged(list(lengths), next_n=next_n, heads=heads, dim=dim, page=page)
    change(case)
    same(*scored(case, 140, kernel=kernel))


def _packed(
    *, arch: str, scores: int, next_n: int = 2, limit: int = 300, batch: int = 5,
    kernel: str | None = None,
) -> None:  # fmt: skip
    os.environ["DSA_INDEXER_FORCE_ARCH"] = arch
    lengths = [300, 0, 65, 1, 129, 0, 0][:batch]
    case = inputs.paged(lengths, next_n=next_n, heads=16, dim=128, page=64)
    expected = torch.full((batch * next_n, 300), -torch.inf)
    reference.paged(*case.tensors, expected[:, :limit])
    same(packed_rows(case, 300, scores, limit, kernel), expected)


def _disabled() -> None:
    case = inputs.paged([64, 5], heads=16, dim=128, page=64)
    packed = PackedScores(
        torch.full((1024,), POISON), torch.full((2,), -7), torch.full((2,), -7, dtype=torch.int32),
        torch.full((2,), -7, dtype=torch.int32),
    )  # fmt: skip
    off = torch.zeros(1, dtype=torch.int32)
    paged_launch.paged_packed(*case.tensors, packed, limit=64, enabled=off)
    assert (packed.scores == POISON).all()
    for words in (packed.row_at, packed.row_end, packed.arrived):
        assert (words == -7).all()
    paged_launch.paged_packed(*case.tensors, packed, limit=64, enabled=off + 1)
    assert packed.row_at.tolist() == [0, padded(64)]


def _many_requests(dim: int = 64, kernel: str = "portable", packed: bool = True) -> None:
    """More lengths than a program reads together; the walk crosses many requests."""
    lengths = [(7 * i) % 71 if i % 12 == 7 else -i for i in range(150)]
    case = inputs.paged(lengths, heads=16, dim=dim, page=64)
    same(*scored(case, 70, programs=2, kernel=kernel))
    if not packed:
        return
    dense = torch.empty((150, 70))
    reference.paged(*case.tensors, dense)
    same(packed_rows(case, 70, 100 * padded(70)), dense)


def _every_code(case: inputs.Paged) -> None:
    """All 256 codes in keys and queries; NaN there, in a scale and in a weight."""
    flat = case.k_cache.view(len(case.k_cache), -1)
    page = case.k_cache.shape[1]
    for code in range(256):
        flat[code % 2, (code // 2) % page * 128 + code // 128] = code
    case.q[0, 0, :, 3] = torch.arange(16, dtype=torch.uint8) * 8 + 6
    case.q[1, 0, 2, 9] = 0xFF
    flat[2, page * 128 + 4 : page * 128 + 8] = torch.tensor([torch.nan]).view(torch.uint8)
    case.weights[-1, 1] = torch.nan


def _outside(case: inputs.Paged) -> None:
    pages = len(case.k_cache)
    case.block_table[0, 0], case.block_table[0, 1] = -1, pages
    case.block_table[1, 0] = 2**31 - 1
    case.block_table[4, 1:] = -(2**31)


def _lengths_by_row(case: inputs.Paged) -> None:
    """Not contiguous, in any order, some beyond the table."""
    batch, next_n = case.q.shape[:2]
    room = torch.full((batch, 2 * next_n + 1), 10**6, dtype=torch.int32)
    room[:, 1::2] = torch.arange(batch * next_n).view(batch, next_n) * 17 % 150 - 4
    case.seq_lens = room[:, 1::2]
    case.seq_lens[0, 0] = 2**31 - 1


def _apart(case: inputs.Paged) -> None:
    """Pages of a buffer of all layers, aligned to 4 bytes only; table and weights strided."""
    pages, page, width = case.k_cache.shape
    room = torch.full((pages, 2 * page * width + 4), 0x7F, dtype=torch.uint8)
    held = room[:, 4 : 4 + page * width].unflatten(1, (page, width))
    held.copy_(case.k_cache)
    case.k_cache = held
    table = torch.full((case.block_table.shape[1], 2 * len(case.q)), -1, dtype=torch.int32)
    table[:, ::2] = case.block_table.T
    case.block_table = table[:, ::2].T
    case.weights = case.weights.T.contiguous().T


_CASES: dict[str, Callable[[], None]] = {
    "e4m3": partial(_dense, arch="89"),
    "e4m3, 64 heads, 2 rows": partial(_dense, arch="89", heads=64, next_n=2),
    "e4m3, 20 heads, 4 rows, page 32": partial(_dense, arch="89", heads=20, next_n=4, page=32),
    "e4m3, 3 groups of rows": partial(_dense, arch="89", heads=64, next_n=5, lengths=(70, 3)),
    "e4m3, page 16, D 64": partial(_dense, arch="89", page=16, dim=64),
    "e4m3, every code": partial(_dense, arch="89", page=128, change=_every_code),
    "fp16, every code": partial(_dense, arch="80", page=64, change=_every_code),
    "fp16, 64 heads, 4 rows": partial(_dense, arch="80", heads=64, next_n=4),
    "fp16, page 128, D 64": partial(_dense, arch="80", page=128, dim=64),
    "pages outside the cache": partial(_dense, arch="89", change=_outside),
    "lengths by row": partial(_dense, arch="80", next_n=2, change=_lengths_by_row),
    "pages apart, strided": partial(_dense, arch="89", next_n=2, change=_apart),
    "packed, one window": partial(_packed, arch="89", scores=12 * 384),
    "packed, several windows": partial(_packed, arch="80", scores=1700, batch=7),
    "packed, one row a window": partial(_packed, arch="89", scores=768, next_n=1),
    "packed, cut": partial(_packed, arch="89", scores=1100, limit=200),
    "packed, one request": partial(_packed, arch="89", scores=1000, batch=1),
    "one request": partial(_dense, arch="89", next_n=2, lengths=(137,)),
    "packed, disabled": _disabled,
    "150 requests": _many_requests,
}  # fmt: skip


def _long_request() -> None:
    """One program, whose ring of tiles turns several times."""
    os.environ["DSA_INDEXER_FORCE_ARCH"] = "90"
    case = inputs.paged([600, 5], heads=16, dim=128, page=64)
    same(*scored(case, 600, programs=1, kernel="hopper"))


_hopper_dense = partial(_dense, arch="90", kernel="hopper")
_hopper_packed = partial(_packed, arch="90", kernel="hopper")
_CASES |= {
    "in Gluon": _hopper_dense,
    "in Gluon, 64 heads, 2 rows": partial(_hopper_dense, heads=64, next_n=2),
    "in Gluon, 20 heads, 4 rows, page 32": partial(_hopper_dense, heads=20, next_n=4, page=32),
    "in Gluon, every code": partial(_hopper_dense, page=128, change=_every_code),
    "in Gluon, pages outside the cache": partial(_hopper_dense, change=_outside),
    "in Gluon, lengths by row": partial(_hopper_dense, next_n=2, change=_lengths_by_row),
    "in Gluon, packed, several windows": partial(_hopper_packed, scores=1700, batch=7),
    "in Gluon, packed, one request": partial(_hopper_packed, scores=1000, batch=1),
    "in Gluon, a long request": _long_request,
    "in Gluon, 150 requests": partial(_many_requests, 128, "hopper", packed=False),
}

RUNS = [Run(f"paged logits, {name}", check) for name, check in _CASES.items()]
