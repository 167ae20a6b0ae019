"""The CPU engine: the kernels' plain-torch references on host memory."""

from collections.abc import Callable

import torch

from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.selection import prove, select
from indexer_service.kernels.configuration import Configuration, configuration


class CpuEngine:
    """See `indexer_service.engine.Engine`. Sets the number of torch's threads in this process."""

    configuration: Configuration

    def __init__(self, settings: EngineSettings) -> None:
        self.configuration = configuration("cpu-reference")
        self._workspace = settings.workspace_bytes
        # Every session's thread would bring as many: where they outnumber the cores, they spin.
        torch.set_num_threads(settings.cpu_threads)

    def check_session(self) -> None:
        pass

    def warm_up(self) -> None:
        prove(self.select, 16, torch.device("cpu"))

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        select(
            inputs, top_k, out, on_stage, workspace=self._workspace, impl="auto",
            nan_rows=inputs.nan_rows,
        )  # fmt: skip
