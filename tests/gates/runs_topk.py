"""What is interpreted of topk: each way through the kernel against the reference.

The constants are made small, so that small rows are long ones. Each case says which ways its
rows must take, so that none is left out without being noticed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from indexer_service.kernels.nan_seen import NanSeen, row_of
from indexer_service.kernels.topk import kernel, launch, reference
from indexer_service.kernels.topk.memory import select_from_memory
from indexer_service.kernels.topk.plan import Plan, Sizes
from indexer_service.kernels.topk.selection import select_from_tile
from tests.gates.kernels import Run

SIZES = Sizes(warps=1, registers=128, block=256, sample=64, tile=128, small=128, capacity=256)
GROUPS = 32
"""128 candidates a split."""

ROW, CANDIDATES, CANDIDATES_AGAIN, ROW_AGAIN = (
    "row", "candidates", "candidates in memory", "row in memory",
)  # fmt: skip
"""What a row is selected from: in registers, or in memory."""


@contextmanager
def _taking(*ways: str) -> Iterator[None]:
    """Fails unless the rows take these ways and no others."""
    taken = set()

    def tile(*arguments: Any) -> None:
        lists = arguments[7]
        taken.add(CANDIDATES if int(lists.handle.data[0]) else ROW)
        select_from_tile(*arguments)

    def memory(*arguments: Any) -> None:
        listed = arguments[5]
        taken.add(CANDIDATES_AGAIN if bool(listed.handle.data[0]) else ROW_AGAIN)
        select_from_memory(*arguments)

    with (
        patch.object(kernel, "select_from_tile", tile),
        patch.object(kernel, "select_from_memory", memory),
    ):
        yield
    assert taken == set(ways), taken


def _random(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn((rows, length), generator=torch.Generator().manual_seed(seed))


def _compare(
    scores: Tensor,
    k: int,
    splits: int,
    start: list[int] | None = None,
    end: list[int] | None = None,
    groups: int = GROUPS,
    ways: tuple[str, ...] = (ROW,),
    sizes: Sizes = SIZES,
) -> None:
    rows = len(scores)
    bounds = [None if b is None else torch.tensor(b, dtype=torch.int32) for b in (start, end)]
    room = torch.full((rows, k + 3), -7, dtype=torch.int32)
    out, expected = room[:, 1 : k + 1], torch.empty((rows, k), dtype=torch.int32)
    arrived = torch.zeros(rows, dtype=torch.int32)
    plan = Plan(sizes, splits, rows if splits > 1 else 2, groups)
    seen = NanSeen(torch.zeros(1, dtype=torch.int32), first_row=3)
    with _taking(*ways):
        launch.run(
            plan, scores, k, out, row_start=bounds[0], row_end=bounds[1], arrived=arrived, nan=seen
        )
    wrong = _first_with_nan(scores, *bounds)
    assert row_of(int(seen.word)) == (None if wrong is None else 3 + wrong)
    reference.select(scores, k, bounds[0], bounds[1], expected)
    assert torch.equal(out, expected)
    assert (room[:, [0, -2, -1]] == -7).all()
    assert (arrived == 0).all()


def _first_with_nan(scores: Tensor, start: Tensor | None, end: Tensor | None) -> int | None:
    width = scores.shape[1]
    for row, row_scores in enumerate(scores):
        begin = 0 if start is None else int(start[row].clamp(0, width))
        until = width if end is None else int(end[row].clamp(0, width))
        if bool(row_scores[begin:until].isnan().any()):
            return row
    return None


def _nan_at(column: int, row: int = 1, length: int = 600, rows: int = 3) -> Tensor:
    scores = _random(rows, length)
    scores[row:, column] = torch.nan
    return scores


def _noted_by_rows() -> None:
    """Where whole scores are at hand, and not Triton's kernel: the first row wins."""
    seen = NanSeen(torch.zeros(1, dtype=torch.int32))
    seen.behind(8).note(torch.tensor([False, False]))
    assert row_of(int(seen.word)) is None
    seen.behind(8).note(torch.tensor([False, True, True]))
    assert row_of(int(seen.word)) == 9
    seen.note(torch.tensor([True]))
    seen.behind(2).note(torch.tensor([True]))
    assert row_of(int(seen.word)) == 0


def _nan_apart() -> None:
    """As where the kernel that selects has no register left."""
    with patch.object(launch, "_nan_is_apart", lambda device: True):
        _compare(_nan_at(7, length=100), 30, 1)
        _compare(_nan_at(90, length=100), 30, 1, None, [90, 80, 91])
        _compare(_nan_at(7, length=100), 30, 1, [8, 8, 7])
        _compare(_nan_at(599), 10, 4, ways=(CANDIDATES,))
        _compare(_random(3, 100), 30, 1)
        for enabled in (None, 1, 0):
            _packed(enabled)


def _ties_and_the_rest() -> None:
    """Few values, each many times; NaN, infinities and both zeros among them."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45, -3e38])
    for length, k, way in ((100, 40, ROW), (300, 60, ROW_AGAIN)):
        which = torch.randint(0, 9, (3, length), generator=torch.Generator().manual_seed(1))
        _compare(values[which], k, 1, ways=(way,))


def _bounds(splits: int) -> None:
    scores = _random(6, 420)[:, 3:400]  # no row begins where 16 bytes do
    start = [0, -5, 150, 300, 396, -(2**31)]
    end = [397, 10, 390, 200, 2**31 - 1, 0]
    _compare(scores, 20, splits, start, end, ways=(ROW, CANDIDATES))
    _compare(scores[3:], 20, splits, None, end[3:], ways=(ROW, CANDIDATES))


def _sample_misleads(splits: int) -> None:
    """The largest scores stand where none is looked at: fewer candidates than are wanted."""
    length, together = 640, 4
    parts = SIZES.sample // together
    stride = length // parts
    i = torch.arange(parts)
    jitter = ((i * 2654435761) % 2**32) * (stride - together + 1) >> 32
    seen = (i * stride + jitter) // together * together
    seen = (seen.unsqueeze(1) + torch.arange(together)).flatten()
    scores = _random(2, length) - 100
    scores[:, seen] += 300
    assert SIZES.sample < 100
    _compare(scores, 100, splits, ways=(ROW_AGAIN,))


def _packed(enabled: int | None) -> None:
    lengths = [0, 5, -3, 600, 300, 7]
    at = [0, 64, 0, 128, -1, 768]
    scores = _random(1, 832)[0]
    scores[600] = torch.nan
    rows, k = len(at), 9
    seen = NanSeen(torch.zeros(1, dtype=torch.int32))
    out = torch.full((rows, k), -7, dtype=torch.int32)
    expected = out.clone()
    for row, (begin, length) in enumerate(zip(at, lengths, strict=True)):
        if begin >= 0 and enabled != 0:
            piece = scores[begin : begin + max(length, 0)].unsqueeze(0)
            reference.select(piece, k, None, None, expected[row : row + 1])
    launch.run(
        Plan(SIZES, 3, rows, GROUPS), scores, k, out,
        row_at=torch.tensor(at), row_end=torch.tensor(lengths, dtype=torch.int32),
        arrived=torch.zeros(rows, dtype=torch.int32),
        enabled=None if enabled is None else torch.tensor([enabled], dtype=torch.int32), nan=seen,
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert row_of(int(seen.word)) == (None if enabled == 0 else 3)


def _public_call() -> None:
    scores = _random(3, 50)
    out = torch.empty((3, 60), dtype=torch.int32)
    launch.select(scores, 60, None, torch.tensor([50, 0, 20], dtype=torch.int32), out)
    expected = torch.empty_like(out)
    reference.select(scores, 60, None, torch.tensor([50, 0, 20], dtype=torch.int32), expected)
    assert torch.equal(out, expected)


def _bounds_at_a_stride() -> None:
    scores = _random(4, 50)
    bounds = torch.tensor([[0, 50], [10, 30], [45, 60], [20, 5]], dtype=torch.int32)
    start, end = bounds.unbind(1)
    out, expected = (torch.empty((4, 12), dtype=torch.int32) for _ in range(2))
    launch.select(scores, 12, start, end, out)
    reference.select(scores, 12, start, end, expected)
    assert torch.equal(out, expected)


def _long(
    scores: Tensor, k: int, splits: int, *ways: str, groups: int = GROUPS
) -> Callable[[], None]:
    return partial(_compare, scores, k, splits, groups=groups, ways=ways)


_CASES: dict[str, Callable[[], None]] = {
    "short rows": partial(_compare, _random(3, 100), 30, 1),
    "more than there are": partial(_compare, _random(2, 100), 300, 1),
    "a long row": _long(_random(3, 600), 10, 1, CANDIDATES),
    "a long row in splits": _long(_random(2, 1000), 10, 4, CANDIDATES),
    "more candidates than registers": _long(_random(1, 900), 60, 4, CANDIDATES_AGAIN),
    "more candidates than are kept": _long(_random(1, 900), 60, 1, ROW_AGAIN),
    "more wanted than a split keeps": _long(_random(1, 500), 200, 2, ROW_AGAIN),
    "all equal": _long(torch.full((1, 500), 2.5), 40, 2, ROW_AGAIN),
    "ascending": _long(torch.arange(600.0).view(1, -1), 20, 3, CANDIDATES),
    "few may be chosen": _long(
        torch.where(_random(1, 600) > 2, 1.0, -torch.inf), 60, 2, CANDIDATES
    ),
    "few may be chosen, of the lowest score there is": _long(
        torch.where(_random(1, 600) > 2, torch.finfo(torch.float32).min, -torch.inf), 60, 2,
        CANDIDATES,
    ),
    "ties, NaN, infinities, zeros": _ties_and_the_rest,
    "NaN in a short row": partial(_compare, _nan_at(7, length=100), 30, 1),
    "NaN behind a short row's end": partial(
        _compare, _nan_at(90, length=100), 30, 1, None, [90, 80, 91]
    ),
    "NaN in a long row": _long(_nan_at(599), 10, 1, CANDIDATES),
    "NaN in a split of a long row": _long(_nan_at(300), 10, 4, CANDIDATES),
    "NaN, more wanted than a split keeps": _long(_nan_at(499), 200, 2, ROW_AGAIN),
    "NaN, where no register is left": partial(
        _compare, _nan_at(300), 10, 4, ways=(CANDIDATES,),
        sizes=replace(SIZES, streams_nan=False),
    ),
    "NaN, by a kernel of its own": _nan_apart,
    "NaN noted by rows": _noted_by_rows,
    "bounds": partial(_bounds, 1),
    "bounds, in splits": partial(_bounds, 2),
    "bounds at a stride": _bounds_at_a_stride,
    "a sample that misleads": partial(_sample_misleads, 2),
    "packed rows": partial(_packed, None),
    "packed rows, enabled": partial(_packed, 1),
    "packed rows, not enabled": partial(_packed, 0),
    "as it is called": _public_call,
}  # fmt: skip

RUNS = [Run(f"topk {name}", check) for name, check in _CASES.items()]
