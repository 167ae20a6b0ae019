"""Before the first step: tune, and run a small batch of every kind that a session can need.

No kernel is compiled for a length or a stride, and few for a number of rows or the width of a
table. Which ones is known to the operations alone, so that here sizes grow by powers, each with
rows that see nothing: a batch costs its launches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product

import torch
from torch import Tensor

from indexer_service.kernels import indexer, k_cache, mqa_logits, topk
from indexer_service.kernels.architecture import on
from indexer_service.kernels.compilation import count_compilations, make_together
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.nan_seen import NanSeen
from indexer_service.kernels.topk.plan import LENGTHS
from indexer_service.kernels.tune import tuned_operations

Progress = Callable[[int, int, str], None]

_MOST_KEYS = 1 << 16
"""Gathered keys of a warm-up batch; kernels do not differ beyond, but for top-k's."""
_FEW_PAGES = 4
_FEW_ROWS = 4


@dataclass(frozen=True)
class Report:
    """What a warm-up did: batches run, kernels compiled or loaded from disk, and how long."""

    batches: int
    kernels: int
    seconds: float


Batch = tuple[str, Callable[[], object]]


def warm_up(
    geometry: Geometry, device: torch.device, *, progress: Progress | None = None
) -> Report:
    """Make all kernels for a geometry; nothing compiles afterwards, and all can be captured.

    What was tuned, on this machine and for this kind of GPU, is remembered (`tuned_file`).

    Args:
        device: where the session runs; without a GPU there is nothing to compile.
        progress: called before each batch with how many are done, how many there are, and what
            comes.
    """
    began = time.monotonic()
    kinds = [run for _, run in _batches(geometry, device, every=False)]
    batches: list[Batch] = [
        *tuned_operations(geometry, device),
        ("compile in threads", partial(make_together, kinds, device)),
        *_batches(geometry, device, every=True),
    ]
    with on(device), count_compilations() as compiled:
        for done, (what, run) in enumerate(batches):
            if progress is not None:
                progress(done, len(batches), what)
            run()
    if device.type == "cuda":
        # Not the device: others' work there may take as long as it likes.
        torch.cuda.current_stream(device).synchronize()
    return Report(len(batches), len(compiled), time.monotonic() - began)


def _batches(geometry: Geometry, device: torch.device, *, every: bool) -> Iterator[Batch]:
    """Batches of all sizes, or only the smallest and the largest of each kind."""
    for keys in (1, max(geometry.max_decode_rows, geometry.max_prefill_rows)):
        yield f"k_cache.insert, {keys} keys", partial(_insert, geometry, keys, device)
    yield "k_cache.gather", partial(_gather, geometry, device)
    for next_n in geometry.next_n:
        most = max(1, geometry.max_decode_rows // next_n)
        sizes = _sizes((1, geometry.page), (most, geometry.max_context), (2, 4), every)
        for (batch, width), by_row, switched in product(sizes, (False, True), (False, True)):
            what = f"{batch} requests of {next_n} rows, {width} tokens"
            run = partial(_decode, geometry, device, batch, next_n, width, by_row, switched)
            yield f"indexer.select_paged, {what}", run
    last = (geometry.max_prefill_rows, min(geometry.max_context, _MOST_KEYS))
    for (rows, keys), switched in product(_sizes((1, 1), last, (2, 16), every), (False, True)):
        run = partial(_prefill, geometry, device, rows, keys, switched)
        yield f"indexer.select_ragged, {rows} rows over {keys} keys", run
    widths = _powers(1, geometry.max_context, 16 if every else geometry.max_context)
    for width in sorted({*widths, *LENGTHS}):
        yield f"topk.select, {width} scores", partial(_select, geometry, device, width)
    if geometry.notes_nan and device.type == "cuda":
        for width in LENGTHS:
            yield f"topk that notes NaN, {width} scores", partial(_note, geometry, device, width)


def _sizes(
    first: tuple[int, int], last: tuple[int, int], factors: tuple[int, int], every: bool
) -> list[tuple[int, int]]:
    """All pairs of powers from first to last, or those with one of the two at its largest."""
    if not every:
        return [(first[0], last[1]), (last[0], first[1])]
    numbers = [_powers(*some) for some in zip(first, last, factors, strict=True)]
    return list(product(numbers[0], numbers[1]))


def _powers(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... below last, and last."""
    values = []
    while first < last:
        values.append(first)
        first *= factor
    return [*values, last]


def _insert(geometry: Geometry, keys: int, device: torch.device) -> None:
    k = torch.zeros((keys, geometry.head_dim), dtype=geometry.key_dtype, device=device)
    slots = torch.full((keys,), -1, dtype=torch.int64, device=device)
    k_cache.insert(k, slots, geometry.cache(_FEW_PAGES, device))
    if geometry.replica is not None:  # on a peer: before anything is captured, it is made reachable
        replica = geometry.cache(_FEW_PAGES, geometry.replica)
        k_cache.insert(k, slots, geometry.cache(_FEW_PAGES, device), replica=replica)


def _gather(geometry: Geometry, device: torch.device) -> None:
    one = torch.ones((1, 1), dtype=torch.int32, device=device)
    k_cache.gather(geometry.cache(_FEW_PAGES, device), one, one[0])
    k_cache.gather(geometry.cache(_FEW_PAGES, device), one, one[0], total=1)
    k_cache.gather(
        geometry.cache(_FEW_PAGES, device), one, one[0], total=1, enabled=_enabled(device)
    )


def _decode(
    geometry: Geometry, device: torch.device, batch: int, next_n: int, width: int, by_row: bool,
    switched: bool,
) -> None:  # fmt: skip
    shape = (batch, next_n, geometry.heads, geometry.head_dim)
    q = torch.zeros(shape, dtype=torch.uint8, device=device)
    cache = geometry.cache(_FEW_PAGES, device)
    weights = torch.zeros((batch * next_n, geometry.heads), device=device)
    lengths = torch.zeros((batch, next_n) if by_row else batch, dtype=torch.int32, device=device)
    table = torch.zeros((batch, geometry.columns(width)), dtype=torch.int32, device=device)
    indexer.select_paged(
        q, cache, weights, lengths, table, geometry.k, workspace=geometry.workspace,
        enabled=_enabled(device) if switched else None,
    )  # fmt: skip
    if not switched:
        mqa_logits.paged(q, cache, weights, lengths, table, geometry.page)


def _prefill(
    geometry: Geometry, device: torch.device, rows: int, keys: int, switched: bool
) -> None:
    q = torch.zeros((rows, geometry.heads, geometry.head_dim), dtype=torch.uint8, device=device)
    k = torch.zeros((keys, geometry.head_dim), dtype=torch.uint8, device=device)
    scales = torch.zeros(keys, device=device)
    weights = torch.zeros((rows, geometry.heads), device=device)
    bound = torch.zeros(rows, dtype=torch.int32, device=device)
    indexer.select_ragged(
        q, k, scales, weights, bound, bound, geometry.k, workspace=geometry.workspace,
        enabled=_enabled(device) if switched else None,
    )  # fmt: skip
    if not switched:
        some = slice(0, _FEW_ROWS)
        bound = bound[some]
        mqa_logits.ragged(q[some], k, scales, weights[some], bound, bound)


def _select(geometry: Geometry, device: torch.device, width: int) -> None:
    scores = torch.zeros((_FEW_ROWS, width), device=device)
    bound = torch.zeros(_FEW_ROWS, dtype=torch.int32, device=device)
    for start, end in product((None, bound), repeat=2):
        topk.select(scores, geometry.k, start, end)


def _note(geometry: Geometry, device: torch.device, width: int) -> None:
    launch = import_module("indexer_service.kernels.topk.launch")  # Triton
    scores = torch.zeros((_FEW_ROWS, width), device=device)
    out = torch.empty((_FEW_ROWS, geometry.k), dtype=torch.int32, device=device)
    nan = NanSeen(torch.zeros(1, dtype=torch.int32, device=device))
    launch.select(scores, geometry.k, None, None, out, nan=nan)


def _enabled(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.int32, device=device)
