"""The steps of one session: its memory, and inputs that differ from step to step.

Pages are shared between requests, as prefix caching does, so that the K cache stays small; what
is measured is work and hand-over, not the memory of a real cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.load.workload import HEAD_DIM, Workload
from indexer_client import StepInputs
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

_VARIETY = 61  # prime: queries and inputs come together anew for thousands of steps
_LARGEST_SCALE = 0.5


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


class SessionSteps:
    """K caches of random keys, and the steps that read them.

    Args:
        shapes: gives the n-th step's; the steps repeat after `variety` of them.
        seed: other sessions have other keys, queries and tables.
        seconds: when each step is to begin, if that was recorded.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        shapes: Callable[[int], Shape],
        variety: int,
        seed: int,
        seconds: Sequence[float] = (),
    ) -> None:
        self.geometry, self.seconds = geometry, seconds
        self._generator = torch.Generator().manual_seed(seed)
        self._pages = geometry.table_width + _VARIETY
        self.k_caches = {layer: self._keys(layer) for layer in geometry.layers}
        self.fallback = InlineSelector(
            {layer: cache.tensor for layer, cache in self.k_caches.items()}, geometry.top_k
        )
        rows = geometry.max_rows + _VARIETY
        q = torch.randn(rows, geometry.heads, HEAD_DIM, generator=self._generator)
        self._q = q.to(torch.float8_e4m3fn).view(torch.uint8)
        self._weights = torch.randn(rows, geometry.heads, generator=self._generator)
        self._steps = [self._planned(shapes(number)) for number in range(variety)]

    def step(self, number: int) -> PlannedStep:
        return self._steps[number % len(self._steps)]

    def query(self, number: int, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q, e4m3 bytes [rows, heads, head_dim], and weights, float32 [rows, heads], of a layer."""
        begin = (number * len(self.geometry.layers) + self.geometry.layers.index(layer)) % _VARIETY
        return self._q[begin : begin + rows], self._weights[begin : begin + rows]

    def close(self) -> None:
        for cache in self.k_caches.values():
            cache.memory.close()

    def _keys(self, layer: int) -> SharedTensor:
        shape = (self._pages, self.geometry.page_size, HEAD_DIM + 4)
        cache = SharedTensor.allocate(shape, torch.uint8, f"layer{layer}")
        values, scales = planes(cache.tensor)
        keys = torch.randn(*shape[:2], HEAD_DIM, generator=self._generator)
        values.copy_(keys.to(torch.float8_e4m3fn).view(torch.uint8))
        factors = torch.rand(*shape[:2], 1, generator=self._generator) * _LARGEST_SCALE + 0.01
        scales.copy_(factors.view(torch.uint8))
        return cache

    def _planned(self, shape: Shape) -> PlannedStep:
        longest = max(shape.lengths)
        offsets = torch.tensor([0, *shape.rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tables = [
            torch.randperm(self._pages, generator=self._generator)[: self.geometry.columns(longest)]
            for _ in shape.rows
        ]
        inputs = StepInputs(
            query_start=offsets,
            seq_lens=torch.tensor(shape.lengths, dtype=torch.int32),
            block_table=torch.stack(tables).to(torch.int32),
            rows=sum(shape.rows),
            decode_requests=shape.decode_requests,
            rows_per_decode=shape.rows_per_decode,
            max_length=longest,
            exact_seq_lens=list(shape.lengths),
            exact_query_start=offsets.tolist(),
        )
        return PlannedStep(shape.kind, inputs, shape.layers, longest)


def drawn_steps(workload: Workload, seed: int) -> SessionSteps:
    """Steps as the workload's distributions make them."""
    chance = random.Random(seed)
    return SessionSteps(workload.geometry, lambda _: _drawn(workload, chance), _VARIETY - 1, seed)


def _drawn(workload: Workload, chance: random.Random) -> Shape:
    steps = workload.steps
    mix = (steps.mix.decode, steps.mix.mixed, steps.mix.prefill)
    kind = chance.choices(tuple(Kind), mix)[0]
    decodes = 0 if kind is Kind.PREFILL else max(steps.batch.draw(chance), 1)
    rows = [steps.rows_per_decode] * decodes
    if kind is not Kind.DECODE:
        rows.append(max(steps.prefill_rows.draw(chance), 1))
    return Shape(
        decode_requests=decodes,
        rows_per_decode=steps.rows_per_decode if decodes else 0,
        rows=tuple(rows),
        # A request is at least as long as its rows of this step.
        lengths=tuple(max(steps.context.draw(chance), count) for count in rows),
        layers=workload.model.indexer_layers,
    )
