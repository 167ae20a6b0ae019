"""Which steps a model of this process has: made when its K caches are there, and made anew when
they have moved.

vLLM makes a temporary KV cache to find out what graphs need, and builders anew with each.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from attention_worker.plugin.layers import Model
from attention_worker.plugin.model_steps import Engine, HostSteps, ModelSteps, RemoteHostSteps
from attention_worker.plugin.settings import asks_for_service
from ipc_handoff.layout import HandoffGeometry


@dataclass(frozen=True)
class _Open:
    addresses: tuple[int, ...]
    geometry: HandoffGeometry
    steps: ModelSteps


_open: dict[tuple[Model, tuple[int, ...]], _Open] = {}


def steps_of(
    model: Model, geometry: HandoffGeometry, caches: Mapping[int, Tensor], engine: Engine
) -> ModelSteps:
    """The steps of a model's layers: those of before if neither caches nor geometry changed.

    Args:
        caches: by layer, uint8 [pages, page, D+4].
    """
    key = (model, geometry.layers)
    addresses = tuple(caches[layer].data_ptr() for layer in geometry.layers)
    found = _open.get(key)
    if found is None or found.addresses != addresses or found.geometry != geometry:
        if found is not None:
            del _open[key]
            found.steps.close()
        found = _Open(addresses, geometry, _make(model, geometry, caches, engine))
        _open[key] = found
    return found.steps


def open_steps() -> list[ModelSteps]:
    """Of all models of this process."""
    return [each.steps for each in _open.values()]


def _make(
    model: Model, geometry: HandoffGeometry, caches: Mapping[int, Tensor], engine: Engine
) -> ModelSteps:
    if engine.device.type == "cpu":
        if asks_for_service(engine.settings):
            return RemoteHostSteps(geometry, caches, engine)
        return HostSteps(geometry, caches)
    from attention_worker.plugin.device_model_steps import DeviceModelSteps

    return DeviceModelSteps(geometry, caches, engine, model)
