"""Before the first step: tune, and run a small batch of every kind that a session can need.

No kernel is compiled for a length or a stride, and few for a number of rows or the width of a
table. Which ones is known to the operations alone, so that here sizes grow by powers, each with
rows that see nothing: a batch costs its launches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from indexer_service.kernels import indexer, k_cache, mqa_logits, topk
from indexer_service.kernels.compilation import count_compilations
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.tune import tuned_operations

Progress = Callable[[int, int, str], None]

_MOST_KEYS = 1 << 16
"""Gathered keys of a warm-up batch; kernels do not differ beyond."""
_FEW_PAGES = 4


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
    batches = [*tuned_operations(geometry, device), *_batches(geometry, device)]
    with count_compilations() as compiled:
        for done, (what, run) in enumerate(batches):
            if progress is not None:
                progress(done, len(batches), what)
            run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Report(len(batches), len(compiled), time.monotonic() - began)


def _batches(geometry: Geometry, device: torch.device) -> Iterator[Batch]:
    for rows in (1, geometry.max_prefill_rows):
        yield f"k_cache.insert, {rows} keys", partial(_insert, geometry, rows, device)
    yield "k_cache.gather", partial(_gather, geometry, device)
    widths = _powers(geometry.page, geometry.max_context, 4)
    for next_n in geometry.next_n:
        requests = _powers(1, max(1, geometry.max_decode_rows // next_n), 2)
        for batch, width, by_row in product(requests, widths, (False, True)):
            what = f"{batch} requests of {next_n} rows, {width} tokens"
            run = partial(_decode, geometry, device, batch, next_n, width, by_row)
            yield f"indexer.select_paged, {what}", run
    most = min(geometry.max_context, _MOST_KEYS)
    for rows, keys in product(_powers(1, geometry.max_prefill_rows, 2), _powers(1, most, 16)):
        what = f"{rows} rows over {keys} keys"
        yield f"indexer.select_ragged, {what}", partial(_prefill, geometry, device, rows, keys)


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
    if geometry.replica:
        k_cache.insert(
            k, slots, geometry.cache(_FEW_PAGES, device), replica=geometry.cache(_FEW_PAGES, device)
        )


def _gather(geometry: Geometry, device: torch.device) -> None:
    one = torch.ones((1, 1), dtype=torch.int32, device=device)
    k_cache.gather(geometry.cache(_FEW_PAGES, device), one, one[0])


def _decode(
    geometry: Geometry, device: torch.device, batch: int, next_n: int, width: int, by_row: bool
) -> None:
    shape = (batch, next_n, geometry.heads, geometry.head_dim)
    q = torch.zeros(shape, dtype=torch.uint8, device=device)
    weights = torch.zeros((batch * next_n, geometry.heads), device=device)
    lengths = torch.zeros((batch, next_n) if by_row else batch, dtype=torch.int32, device=device)
    table = torch.zeros((batch, geometry.columns(width)), dtype=torch.int32, device=device)
    arguments = (q, geometry.cache(_FEW_PAGES, device), weights, lengths, table)
    for enabled in _switches(device):
        indexer.select_paged(*arguments, geometry.k, workspace=geometry.workspace, enabled=enabled)
    mqa_logits.paged(*arguments, geometry.page)


def _prefill(geometry: Geometry, device: torch.device, rows: int, keys: int) -> None:
    q = torch.zeros((rows, geometry.heads, geometry.head_dim), dtype=torch.uint8, device=device)
    k = torch.zeros((keys, geometry.head_dim), dtype=torch.uint8, device=device)
    weights = torch.zeros((rows, geometry.heads), device=device)
    bounds = torch.zeros(rows, dtype=torch.int32, device=device)
    arguments = (q, k, torch.zeros(keys, device=device), weights, bounds, bounds)
    for enabled in _switches(device):
        indexer.select_ragged(*arguments, geometry.k, workspace=geometry.workspace, enabled=enabled)
    few = slice(0, _FEW_PAGES)
    scores = mqa_logits.ragged(q[few], k, arguments[2], weights[few], bounds[few], bounds[few])
    for start, end in product((None, bounds[few]), repeat=2):
        topk.select(scores, geometry.k, start, end)


def _switches(device: torch.device) -> tuple[Tensor | None, Tensor]:
    return None, torch.ones(1, dtype=torch.int32, device=device)
