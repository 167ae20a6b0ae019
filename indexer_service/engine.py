"""Engines: what computes a selection. Chosen once a service, by name or automatically.

A session may name the engine that it wants; it is refused if the service runs another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch

from indexer_service.errors import invalid
from indexer_service.kernels.configuration import Configuration

_CPU, _CUDA = "cpu", "cuda"
# In order of preference; `auto` takes the first for the service's type of device.
_ENGINES = {
    "triton": (_CUDA, "indexer_service.engines.triton:TritonEngine"),
    "cpu-reference": (_CPU, "indexer_service.engines.cpu:CpuEngine"),
}
AUTO = "auto"


@dataclass(frozen=True)
class LayerInputs:
    """One layer of one step, cut to the step's size.

    Shapes as in `indexer_service.kernels.step.select_step`. `skip_requests` are those whose
    inputs cannot be trusted: their rows get -1. `nan_rows`: bool [rows], where the engine marks
    rows whose scores hold NaN, if it can tell; None: nobody asks.
    """

    q: torch.Tensor
    weights: torch.Tensor
    k_cache: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    decode_requests: int
    rows_per_decode: int
    max_length: int
    skip_requests: tuple[int, ...]
    nan_rows: torch.Tensor | None = None


class Engine(Protocol):
    """Computes selections; used by one thread at a time a session, by many sessions."""

    @property
    def configuration(self) -> Configuration: ...

    def check_session(self) -> None:
        """
        Raises:
            ServiceError: no session can have steps answered here, and why.
        """

    def warm_up(self) -> None:
        """Compile what is needed and prove with a tiny selection that the device works."""

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        """Write the selection, int32 [rows, top_k], into `out`.

        `on_stage` is called with "logits" and "topk" after each window of work and may raise to
        abandon the rest.
        """


@dataclass(frozen=True)
class EngineSettings:
    """workspace_bytes: most bytes of any temporary; cpu_threads: of one selection on the CPU;
    device: that selections are computed on.
    """

    workspace_bytes: int
    cpu_threads: int
    device: torch.device = torch.device(_CPU)  # noqa: RUF009 - immutable


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """The engine called `name`; "" and "auto" choose.

    Raises:
        ServiceError: INVALID_ARGUMENT for a name that does not exist, or not for the device.
    """
    here = [key for key, (kind, _) in _ENGINES.items() if kind == settings.device.type]
    chosen = here[0] if name in ("", AUTO) else name
    if chosen not in _ENGINES:
        raise invalid("engine", f"{name!r} is not here", f"auto, {', '.join(_ENGINES)}")
    if chosen not in here:
        raise invalid(
            "engine",
            f"{name!r} does not run on {settings.device}",
            f"auto, {', '.join(here)}, or another device",
        )
    module, _, attribute = _ENGINES[chosen][1].partition(":")
    return cast(Engine, getattr(import_module(module), attribute)(settings))
