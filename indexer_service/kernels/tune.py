"""What a warm-up tunes: the logits' kernels, each over a batch of the session's own shapes."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from indexer_service.kernels import tuning
from indexer_service.kernels.architecture import architecture
from indexer_service.kernels.compilation import make_together
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.gpu_time import microseconds
from indexer_service.kernels.mqa_logits import paged_plan, ragged_plan

C = TypeVar("C", bound=Hashable)

_MOST_TOKENS = 1 << 16
_MOST_REQUESTS = 16
_MOST_ROWS = 1024
"""Of a tuned batch. Larger ones would take longer and choose the same; with fewer requests their
keys would stay in the L2 cache, as a step's never do."""


def tuned_operations(
    geometry: Geometry, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls, each of which tunes an operation; none without a GPU."""
    if device.type != "cuda":
        return
    for next_n in geometry.next_n:
        yield f"tune mqa_logits.paged, {next_n} rows", partial(_paged, geometry, device, next_n)
    yield "tune mqa_logits.ragged", partial(_ragged, geometry, device)


def _paged(geometry: Geometry, device: torch.device, next_n: int) -> None:
    from indexer_service.kernels.mqa_logits.paged_launch import OPERATION, deciding, paged

    batch = max(1, min(_MOST_REQUESTS, geometry.max_decode_rows // next_n))
    tokens = min(_MOST_TOKENS, geometry.max_context)
    pages = batch * geometry.columns(tokens)
    cache = geometry.cache(pages, device)
    table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
    shape = (batch, next_n, geometry.heads, geometry.head_dim)
    q = torch.zeros(shape, dtype=torch.uint8, device=device)
    weights = torch.zeros((batch * next_n, geometry.heads), device=device)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    out = torch.empty((batch * next_n, tokens), device=device)
    asked = deciding(q, cache)
    launch = partial(paged, q, cache, weights, lengths, table, out)
    _best(OPERATION, asked, paged_plan.configurations(**asked), launch, device)


def _ragged(geometry: Geometry, device: torch.device) -> None:
    from indexer_service.kernels.mqa_logits.ragged_launch import ragged

    rows = min(_MOST_ROWS, geometry.max_prefill_rows)
    keys = min(_MOST_TOKENS, geometry.max_context)
    q = torch.zeros((rows, geometry.heads, geometry.head_dim), dtype=torch.uint8, device=device)
    k = torch.zeros((keys, geometry.head_dim), dtype=torch.uint8, device=device)
    scales = torch.zeros(keys, device=device)
    weights = torch.zeros((rows, geometry.heads), device=device)
    start = torch.zeros(rows, dtype=torch.int32, device=device)
    end = torch.full_like(start, keys)
    out = torch.empty((rows, keys), device=device)
    arch = architecture(device)
    _best(
        ragged_plan.OPERATION, ragged_plan.key(arch, geometry.heads),
        ragged_plan.configurations(arch, geometry.heads, geometry.head_dim),
        partial(ragged, q, k, scales, weights, start, end, out), device,
    )  # fmt: skip


def _best(
    operation: str,
    key: Mapping[str, Hashable],
    configurations: Sequence[C],
    launch: Callable[..., None],
    device: torch.device,
) -> None:
    """Tunes over `launch(configuration=...)`, whose kernels are made together first."""
    calls = {c: partial(launch, configuration=c) for c in configurations}
    made = False

    def time(configuration: C) -> float:
        nonlocal made
        if not made:  # and not at all where the choice is remembered
            make_together(list(calls.values()), device)
            made = True
        return microseconds(calls[configuration], device)

    tuning.best(operation, key, configurations, time, device)
