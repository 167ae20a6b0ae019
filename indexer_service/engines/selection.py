"""What every engine does with one layer, and how it proves that its device works."""

from collections.abc import Callable

import torch
from torch import Tensor

from indexer_service.engine import LayerInputs
from indexer_service.kernels.step import select_step

Select = Callable[[LayerInputs, int, Tensor, Callable[[str], None]], None]


def select(
    inputs: LayerInputs,
    top_k: int,
    out: Tensor,
    on_stage: Callable[[str], None],
    *,
    workspace: int,
    impl: str,
    nan_rows: Tensor | None = None,
) -> None:
    """`select_step` of a layer's inputs; see `Engine.select`."""
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
        workspace=workspace,
        on_stage=on_stage,
        impl=impl,
        nan_rows=nan_rows,
    )


def prove(select: Select, heads: int, device: torch.device) -> None:
    """Raise RuntimeError unless a selection of three equal keys is theirs."""
    dim, page = 128, 64
    out = torch.full((1, 4), -2, dtype=torch.int32, device=device)
    inputs = LayerInputs(
        q=torch.ones((1, heads, dim), device=device).to(torch.float8_e4m3fn),
        weights=torch.ones((1, heads), device=device),
        k_cache=torch.zeros((1, page, dim + 4), dtype=torch.uint8, device=device),
        query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([3], dtype=torch.int32, device=device),
        block_table=torch.zeros((1, 1), dtype=torch.int32, device=device),
        decode_requests=1,
        rows_per_decode=1,
        max_length=3,
        skip_requests=(),
    )
    select(inputs, 4, out, lambda stage: None)
    if out.tolist() != [[0, 1, 2, -1]]:
        raise RuntimeError(f"warm-up selected {out.tolist()}")
