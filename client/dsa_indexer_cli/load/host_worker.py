"""A session on the CPU transport: host memory that worker and service share."""

import time
from collections.abc import Mapping

import torch

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.load.answers import first_difference
from dsa_indexer_cli.load.messages import Order
from dsa_indexer_cli.load.recorded import steps_of
from dsa_indexer_cli.load.steps import PlannedStep
from dsa_indexer_cli.load.worker import NO_TIME, Check, Opened, Ran, Tell
from dsa_indexer_cli.load.workload import CPU, HEAD_DIM, INLINE
from indexer_client import IndexerError, Session, Source
from indexer_client.statistics import Statistics
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

_LARGEST_SCALE = 0.5
_ATTACH_SECONDS = 60.0


class HostWorker:
    """Args:
    order: of the session.
    """

    def __init__(self, order: Order) -> None:
        load = order.workload.load
        self.steps = steps_of(order.workload, order.seed)
        geometry = self.steps.geometry
        generator = torch.Generator().manual_seed(order.seed)
        self._caches = {
            layer: _random_keys(geometry, self.steps.pages, layer, generator)
            for layer in geometry.layers
        }
        self._fallback = InlineSelector(
            {layer: cache.tensor for layer, cache in self._caches.items()}, geometry.top_k
        )
        self._is_inline = load.placement == INLINE
        self._settings = order.settings()
        self._attach_seconds = load.attach_seconds or _ATTACH_SECONDS
        self._out = torch.empty(geometry.max_rows, geometry.top_k, dtype=torch.int32)
        self._expected = torch.empty_like(self._out)

    def open(self, tell: Tell) -> Opened:
        self._session = Session(
            self.steps.geometry,
            self._caches,
            self._fallback,
            settings=self._settings,
            engine_name="load",
        )
        self._session.start()
        if self._is_inline:
            return Opened(INLINE)
        try:
            self._session.wait_attached(self._attach_seconds)
        except IndexerError:
            self._session.close()
            raise
        return Opened(CPU, self._session.reasons)

    def run(self, number: int, planned: PlannedStep, compared: int | None) -> Ran:
        geometry, rows = self.steps.geometry, planned.inputs.rows
        out = self._out[:rows]
        queries = {layer: self.steps.query(number, layer, rows) for layer in planned.layers}
        times = [NO_TIME] * len(geometry.layers)
        inline, check = 0, None
        began = time.monotonic_ns()
        with self._session.step(planned.inputs, planned.layers) as step:
            for layer in planned.layers:
                asked = time.monotonic_ns()
                source = step.select(layer, *queries[layer], out=out)
                times[geometry.layers.index(layer)] = time.monotonic_ns() - asked
                inline += source is Source.INLINE
                if layer == compared and source is Source.SERVICE:
                    check = Check(number, layer, planned.inputs, queries[layer], out.clone())
        return Ran(began, time.monotonic_ns(), times, inline, check=check)

    def inline_since(self) -> int:
        return 0

    def compare(self, check: Check) -> str:
        expected = self._expected[: check.inputs.rows]
        self._fallback(check.layer, *check.query, check.inputs, expected)
        return first_difference(check.answer, expected)

    def gpu_memory(self) -> Mapping[str, float]:
        return {}

    def close(self) -> Statistics:
        statistics = self._session.statistics
        self._session.close()
        return statistics

    def free(self) -> None:
        for cache in self._caches.values():
            cache.memory.close()


def _random_keys(
    geometry: HandoffGeometry, pages: int, layer: int, generator: torch.Generator
) -> SharedTensor:
    shape = (pages, geometry.page_size, HEAD_DIM + 4)
    cache = SharedTensor.allocate(shape, torch.uint8, f"layer{layer}")
    values, scales = planes(cache.tensor)
    keys = torch.randn(*shape[:2], HEAD_DIM, generator=generator)
    values.copy_(keys.to(torch.float8_e4m3fn).view(torch.uint8))
    factors = torch.rand(*shape[:2], 1, generator=generator) * _LARGEST_SCALE + 0.01
    scales.copy_(factors.view(torch.uint8))
    return cache
