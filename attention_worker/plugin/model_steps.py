"""The steps of one model of the engine: a thin layer over the client's sessions."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_worker.fallback import InlineSelector
from attention_worker.plugin.settings import PluginSettings, asks_for_service
from indexer_client.errors import IndexerError
from indexer_client.inputs import StepInputs
from indexer_client.session import Session
from indexer_client.settings import ClientSettings
from indexer_client.step import Step
from indexer_client.worker_session import WorkerSession
from indexer_service.kernels import k_cache
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

logger = logging.getLogger(__name__)

_NONE = -1


@dataclass(frozen=True)
class Engine:
    """What the steps of all models of an engine share.

    Attributes:
        device: of the worker.
        rows_per_decode: of a decode request, the most; one without speculation.
        settings, plugin: as the environment has them.
        name: of the served model, for people.
    """

    device: torch.device
    rows_per_decode: int
    settings: ClientSettings
    plugin: PluginSettings
    name: str


class ModelSteps(Protocol):
    """`begin` runs eagerly before every forward; `insert` and `select` in the forward."""

    def begin(self, inputs: StepInputs | None) -> None:
        """The next forward is a step with these inputs; None: it has no rows."""

    def begin_capture(self, rows: int, rows_per_decode: int) -> None:
        """The next forwards are captures of so many rows, and no steps."""

    def insert(self, layer: int, k: Tensor, slots: Tensor) -> None:
        """Quantise keys into a layer's K cache.

        Args:
            k: bf16 or fp16 [T, D]; slots: int64 [n], n <= T, negative: none.
        """

    def select(self, layer: int, q: Tensor, weights: Tensor, out: Tensor) -> None:
        """Select a layer's tokens.

        Args:
            q: e4m3 [T, H, D], weights: fp32 [T, H]; T is at least the step's rows.
            out: int32 [T, k]; rows behind the step's get -1.
        """

    def close(self) -> None:
        """End in good order."""


class HostSteps:
    """On a CPU, in this process.

    Args:
        caches: by layer, uint8 [pages, page, D+4], as vLLM has them.
    """

    def __init__(self, geometry: HandoffGeometry, caches: Mapping[int, Tensor]) -> None:
        self._caches = dict(caches)
        self._inline = InlineSelector(caches, geometry.top_k)
        self._inputs: StepInputs | None = None

    def begin(self, inputs: StepInputs | None) -> None:
        self._inputs = inputs

    def begin_capture(self, rows: int, rows_per_decode: int) -> None:
        raise NotImplementedError("nothing is captured on a CPU")

    def insert(self, layer: int, k: Tensor, slots: Tensor) -> None:
        k_cache.insert(k, slots, self._caches[layer])

    def select(self, layer: int, q: Tensor, weights: Tensor, out: Tensor) -> None:
        rows = 0
        if self._inputs is not None:
            rows = self._inputs.rows
            self._select(layer, q[:rows], weights[:rows], self._inputs, out[:rows])
        out[rows:].fill_(_NONE)

    def _select(
        self, layer: int, q: Tensor, weights: Tensor, inputs: StepInputs, out: Tensor
    ) -> None:
        self._inline(layer, q, weights, inputs, out)

    def close(self) -> None:
        self._inputs = None


class RemoteHostSteps(HostSteps):
    """On a CPU, with a service. Its memory is shared, vLLM's is not: keys are written twice."""

    def __init__(
        self, geometry: HandoffGeometry, caches: Mapping[int, Tensor], engine: Engine
    ) -> None:
        super().__init__(geometry, caches)
        self._geometry = geometry
        self._replicas = {
            layer: SharedTensor.allocate(tuple(cache.shape), cache.dtype, f"layer{layer}")
            for layer, cache in caches.items()
        }
        self.session = Session(
            geometry,
            self._replicas,
            self._inline,
            settings=engine.settings,
            engine_name=engine.name,
        )
        logger.info("dsa-indexer: %d layers, service %s", len(caches), engine.settings.address)
        self._step: Step | None = None
        self._left = 0
        start(self.session, engine)

    def begin(self, inputs: StepInputs | None) -> None:
        # The forward before may have ended early.
        self._end_step()
        super().begin(inputs)

    def insert(self, layer: int, k: Tensor, slots: Tensor) -> None:
        k_cache.insert(k, slots, self._caches[layer], replica=self._replicas[layer].tensor)

    def _select(
        self, layer: int, q: Tensor, weights: Tensor, inputs: StepInputs, out: Tensor
    ) -> None:
        if self._step is None:
            self._step = self.session.step(inputs)
            self._step.__enter__()
            self._left = len(self._geometry.layers)
        self._step.select(layer, q, weights, out=out)
        self._left -= 1
        if not self._left:
            self._end_step()

    def _end_step(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            step.__exit__(None, None, None)

    def close(self) -> None:
        self._end_step()
        self.session.close()
        super().close()


def start(session: WorkerSession, engine: Engine) -> None:
    """Begin to look for a service; with `on_refusal` error also wait until one is there.

    Raises:
        IndexerError: why there is none; the session is closed.
    """
    session.start()
    if engine.plugin.on_refusal == "error" and asks_for_service(engine.settings):
        try:
            session.wait_attached(engine.plugin.attach_seconds)
        except IndexerError:
            session.close()
            raise
