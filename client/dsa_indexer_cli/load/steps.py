"""The steps of one session: inputs that differ from step to step, and queries for all of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from dsa_indexer_cli.load.workload import HEAD_DIM, Workload
from indexer_client import StepInputs
from ipc_handoff.layout import HandoffGeometry

_VARIETY = 61  # prime: queries and inputs come together anew for thousands of steps
_STRIDE = 7919
"""Pages between the tables of a step and the next one's; prime, too."""


class Kind(IntEnum):
    """Of a step, by its requests."""

    DECODE = 0
    MIXED = 1
    PREFILL = 2


@dataclass(frozen=True)
class PlannedStep:
    """One step, before its queries.

    Attributes:
        layers: those that ask, in order.
        longest: tokens of its longest request.
    """

    kind: Kind
    inputs: StepInputs
    layers: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class Shape:
    """Rows of each request of a step and its tokens; decode requests first."""

    decode_requests: int
    rows_per_decode: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        if self.decode_requests == len(self.rows):
            return Kind.DECODE
        return Kind.MIXED if self.decode_requests else Kind.PREFILL


def pages_of(geometry: HandoffGeometry, cache_tokens: int, *, on_gpu: bool) -> int:
    """Of each layer's K cache.

    On a CPU requests share pages, as prefix caching does, so that the caches stay small: the
    hand-over is the same, and the processor's caches are kinder than with real ones. On a GPU that
    would be measured, and each request of the largest step has its own.
    """
    if cache_tokens:
        return max(geometry.columns(cache_tokens), geometry.table_width)
    if on_gpu:
        return geometry.table_width * geometry.max_requests
    return geometry.table_width + _VARIETY


class SessionSteps:
    """Inputs and queries of the steps of a session.

    Args:
        shapes: of the steps, which repeat after the last one.
        seed: other sessions have other queries and tables.
        pages: of each K cache.
        seconds: when each step is to begin, if that was recorded.
        device: where the inputs are to be.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        shapes: Sequence[Shape],
        seed: int,
        pages: int,
        *,
        seconds: Sequence[float] = (),
        device: torch.device | None = None,
    ) -> None:
        self.geometry, self.shapes, self.pages = geometry, shapes, pages
        self.seconds = seconds
        self._device = torch.device("cpu") if device is None else device
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(pages, generator=self._generator).to(torch.int32)
        rows = geometry.max_rows + _VARIETY * len(geometry.layers)
        q = torch.randn(rows, geometry.heads, HEAD_DIM, generator=self._generator)
        self._q = q.to(torch.float8_e4m3fn).view(torch.uint8).to(self._device)
        weights = torch.randn(rows, geometry.heads, generator=self._generator)
        self._weights = weights.to(self._device)
        self._planned: dict[int, PlannedStep] = {}

    def step(self, number: int) -> PlannedStep:
        """The n-th one. A recording's are many, and their tables large: the latest are kept."""
        place = number % len(self.shapes)
        if place not in self._planned:
            if len(self._planned) >= _VARIETY:
                del self._planned[next(iter(self._planned))]
            self._planned[place] = self._plan(place)
        return self._planned[place]

    def queries(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """Of all layers of a step: q, e4m3 bytes [layers, rows, heads, head_dim], and weights,
        float32 [layers, rows, heads]. Views, each shifted by a row.
        """
        layers = len(self.geometry.layers)
        first = number % _VARIETY * layers
        return _shifted(self._q, first, layers, rows), _shifted(self._weights, first, layers, rows)

    def query(self, number: int, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """q, e4m3 bytes [rows, heads, head_dim], and weights, float32 [rows, heads], of a layer."""
        q, weights = self.queries(number, rows)
        ordinal = self.geometry.layers.index(layer)
        return q[ordinal], weights[ordinal]

    def _plan(self, place: int) -> PlannedStep:
        shape = self.shapes[place]
        longest = max(shape.lengths)
        offsets = torch.tensor([0, *shape.rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs = StepInputs(
            query_start=offsets.to(self._device),
            seq_lens=torch.tensor(shape.lengths, dtype=torch.int32).to(self._device),
            block_table=self._tables(place, len(shape.rows), longest).to(self._device),
            rows=sum(shape.rows),
            decode_requests=shape.decode_requests,
            rows_per_decode=shape.rows_per_decode,
            max_length=longest,
            exact_seq_lens=list(shape.lengths),
            exact_query_start=offsets.tolist(),
        )
        return PlannedStep(shape.kind, inputs, shape.layers, longest)

    def _tables(self, place: int, requests: int, longest: int) -> Tensor:
        """int32 [requests, columns], from another page on in each step; no request has a page
        twice, nor another's while there are enough.
        """
        columns = self.geometry.columns(longest)
        first = torch.arange(requests).unsqueeze(1) * columns + place * _STRIDE
        return self._order[(first + torch.arange(columns)) % self.pages]


def _shifted(pool: Tensor, first: int, layers: int, rows: int) -> Tensor:
    """[layers, rows, ...]: layer i has the pool's rows from first + i on. No copy."""
    shape, strides = pool.shape[1:], pool.stride()
    return pool.as_strided((layers, rows, *shape), (strides[0], *strides), first * strides[0])


def drawn_steps(workload: Workload, seed: int, device: torch.device | None = None) -> SessionSteps:
    """Steps as the workload's distributions make them."""
    chance = random.Random(seed)
    geometry = workload.geometry
    pages = pages_of(geometry, workload.model.cache_tokens, on_gpu=device is not None)
    shapes = [_drawn(workload, chance) for _ in range(_VARIETY - 1)]
    return SessionSteps(geometry, shapes, seed, pages, device=device)


def _drawn(workload: Workload, chance: random.Random) -> Shape:
    steps = workload.steps
    mix = (steps.mix.decode, steps.mix.mixed, steps.mix.prefill)
    kind = chance.choices(tuple(Kind), mix)[0]
    decodes = 0 if kind is Kind.PREFILL else max(steps.batch.draw(chance), 1)
    rows = [steps.rows_per_decode] * decodes
    if kind is not Kind.DECODE:
        rows.append(max(steps.prefill_rows.draw(chance), 1))
    contexts = [steps.context.draw(chance) for _ in rows]
    if steps.same_context:
        contexts = contexts[:1] * len(rows)
    return Shape(
        decode_requests=decodes,
        rows_per_decode=steps.rows_per_decode if decodes else 0,
        rows=tuple(rows),
        # A request is at least as long as its rows of this step.
        lengths=tuple(map(max, contexts, rows)),
        layers=workload.model.indexer_layers,
    )
