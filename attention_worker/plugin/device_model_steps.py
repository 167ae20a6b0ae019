"""The steps of one model of an engine on a GPU, with a service or in this process."""

import logging
from collections.abc import Mapping

from torch import Tensor

from attention_worker.device_session import DeviceIndexer
from attention_worker.placements import Placement
from attention_worker.plugin.layers import Model
from attention_worker.plugin.model_steps import Engine, start
from indexer_client.inputs import StepInputs
from indexer_service.kernels.indexer.windows import DEFAULT_WORKSPACE
from ipc_handoff.layout import HandoffGeometry

logger = logging.getLogger(__name__)


class DeviceModelSteps:
    """See `ModelSteps`. Make it before the first capture: graphs hold its addresses.

    Args:
        caches: by layer, uint8 [pages, page, D+4], as vLLM has them: they are read in place.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        caches: Mapping[int, Tensor],
        engine: Engine,
        model: Model,
    ) -> None:
        self.indexer = DeviceIndexer(
            geometry,
            caches,
            device=engine.device,
            settings=engine.settings,
            service_device=engine.plugin.service_device,
            engine_name=engine.name,
            model=model,
        )
        logger.info(
            "dsa-indexer: %s model, %d layers, placement %s: %s",
            model,
            len(geometry.layers),
            self.indexer.placement,
            self.indexer.placement_reason,
        )
        self.indexer.warm_up(sorted({1, engine.rows_per_decode}), progress=_log_progress)
        start(self.indexer, engine)

    def begin(self, inputs: StepInputs | None) -> None:
        if inputs is None:
            self.indexer.begin_inline(1)
        else:
            self.indexer.begin_step(inputs)

    def begin_capture(self, rows: int, rows_per_decode: int) -> None:
        self.indexer.begin_inline(rows, rows_per_decode)

    def insert(self, layer: int, k: Tensor, slots: Tensor) -> None:
        self.indexer.insert(k, slots, layer)

    def select(self, layer: int, q: Tensor, weights: Tensor, out: Tensor) -> None:
        self.indexer.select(layer, q, weights, out)

    def close(self) -> None:
        self.indexer.close()


def reserved_bytes(geometry: HandoffGeometry, engine: Engine) -> int:
    """What sessions and a service will take of the worker's GPU after vLLM has looked how much
    there is: temporaries, banks and, under MPS, the service's own memory.
    """
    if engine.settings.placement == Placement.INLINE:
        return DEFAULT_WORKSPACE
    layout = geometry.device
    banks = engine.settings.banks * (layout.staging_size + layout.answers_size)
    service = 0 if engine.plugin.service_device is not None else engine.plugin.service_memory_mib
    return DEFAULT_WORKSPACE + banks + (service << 20)


def _log_progress(done: int, total: int, what: str) -> None:
    logger.debug("dsa-indexer: kernels %d of %d: %s", done, total, what)
