"""`mqa_logits.ragged` in Triton: from checked arguments to launched kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from indexer_service.kernels.architecture import architecture, native_fp8, processors
from indexer_service.kernels.checks import E4M3, fault
from indexer_service.kernels.mqa_logits import ragged_plan as planning
from indexer_service.kernels.mqa_logits.decoded import decode_codes
from indexer_service.kernels.mqa_logits.ragged_plan import Configuration
from indexer_service.kernels.mqa_logits.ragged_tile import ragged_kernel

WORKSPACE_BYTES = 32 << 20
"""Decoded keys kept at a time below SM89, and as many bytes of queries; more go in turns."""

_FEWEST_HEADS, _SMALLEST_DIM = 16, 32
_VECTOR_BYTES = 16


def ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor,
    *,
    fill: bool = True,
    enabled: Tensor | None = None,
    configuration: Configuration | None = None,
) -> None:
    """See `mqa_logits.ragged`; arguments are checked, q and k are uint8.

    Args:
        fill: write -inf outside a row's bounds; without, nothing is written there.
        enabled: int32 [1] on the GPU; with 0 in it nothing is computed and nothing written.
        configuration: one of `ragged_plan.configurations` for the architecture.
    """
    if not out.numel():
        return
    arch = architecture(q.device)
    chosen = configuration or planning.chosen(arch, q.shape[1], q.shape[2], len(k))
    q, k, weights = _padded(q, k, weights)
    k_scale, row_start, row_end = (x.contiguous() for x in (k_scale, row_start, row_end))
    if native_fp8(arch):
        rows = (weights, row_start, row_end, out)
        _launch(chosen, q.view(E4M3), k.view(E4M3), 0, k_scale, *rows, fill, enabled)
        return
    _, heads, dim = q.shape
    turn = max(1, WORKSPACE_BYTES // (2 * dim))
    for begin in range(0, len(k), turn):
        decoded = decode_codes(k[begin : begin + turn], enabled)
        for first in range(0, len(q), max(1, turn // heads)):
            some = slice(first, first + max(1, turn // heads))
            rows = (weights[some], row_start[some], row_end[some], out[some])
            q_rows = decode_codes(q[some], enabled)
            _launch(chosen, q_rows, decoded, begin, k_scale, *rows, fill, enabled)


def _launch(
    chosen: Configuration,
    q: Tensor,
    k: Tensor,
    begin: int,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor,
    fill: bool,
    enabled: Tensor | None,
) -> None:
    """Scores of the keys from `begin` on; q and k are e4m3 or fp16."""
    rows, heads, dim = q.shape
    together = chosen.rows(heads)
    tiles = -(-len(k) // chosen.keys)
    room = chosen.programs * processors(q.device)
    block_rows = planning.block_rows(rows, tiles, together, room)
    grid = (tiles * -(-rows // block_rows),)
    rest = (k_scale, weights, row_start, row_end, out, enabled)
    scalars = (rows, begin + len(k), block_rows, out.stride(0))
    constants: dict[str, Any] = dict(
        HEADS=heads, DIM=dim, ROWS=together, STAGES=chosen.stages,
        MOST_ROWS=planning.MOST_BLOCK_ROWS, FILL=fill, num_warps=chosen.warps,
    )  # fmt: skip
    if chosen.form == "hopper":
        from indexer_service.kernels.mqa_logits.ragged_hopper import hopper_kernel, operand

        part = 16 * chosen.warps
        q_rows, k_rows = operand(q.flatten(0, 1), together * heads), operand(k, part)
        constants |= dict(PARTS=chosen.keys // part, OVERLAP=chosen.overlap)
        hopper_kernel[grid](q_rows, k_rows, *rest, *scalars, **constants)
    else:
        constants |= dict(KEYS=chosen.keys, DECODED=q.dtype == torch.float16)
        ragged_kernel[grid](q, k, *rest, begin, *scalars, **constants)


def _padded(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous and aligned, heads and dimension powers of two; what is added scores 0."""
    _, heads, dim = q.shape
    more_heads = max(_FEWEST_HEADS, 1 << (heads - 1).bit_length()) - heads
    more_dim = max(_SMALLEST_DIM, 1 << (dim - 1).bit_length()) - dim
    if (heads + more_heads) * (dim + more_dim) > planning.LARGEST_ROW:
        fix = f"heads times D at most {planning.LARGEST_ROW}, or impl='reference'"
        raise fault("q", f"{heads} heads of {dim} are too many", fix)
    if more_heads or more_dim:
        q = pad(q, (0, more_dim, 0, more_heads))
        k = pad(k, (0, more_dim))
        weights = pad(weights, (0, more_heads))
    return _aligned(q), _aligned(k), _aligned(weights)


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _VECTOR_BYTES == 0 else tensor.clone()
