"""The CPU engine: the kernels' plain-torch references on host memory."""

from collections.abc import Callable

import torch

from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.kernels.configuration import Configuration, configuration
from indexer_service.kernels.step import select_step


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
        heads, dim, page = 16, 128, 64
        out = torch.full((1, 4), -2, dtype=torch.int32)
        inputs = LayerInputs(
            q=torch.ones(1, heads, dim).to(torch.float8_e4m3fn),
            weights=torch.ones(1, heads),
            k_cache=torch.zeros(1, page, dim + 4, dtype=torch.uint8),
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([3], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            decode_requests=1,
            rows_per_decode=1,
            max_length=3,
            skip_requests=(),
        )
        self.select(inputs, 4, out, lambda stage: None)
        if out.tolist() != [[0, 1, 2, -1]]:
            raise RuntimeError(f"warm-up selected {out.tolist()}")

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        select_step(
            inputs.q,
            inputs.weights,
            inputs.k_cache,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            top_k,
            decode_requests=inputs.decode_requests,
            rows_per_decode=inputs.rows_per_decode,
            max_length=inputs.max_length,
            skip_requests=inputs.skip_requests,
            out=out,
            workspace=self._workspace,
            on_stage=on_stage,
        )
