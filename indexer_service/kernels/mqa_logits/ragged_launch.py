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

DECODE_WORKSPACE = 64 << 20
_FEWEST_KEYS = 64
"""Decoded at a time, however small the workspace."""

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
    workspace: int | None = None,
    configuration: Configuration | None = None,
) -> None:
    """See `mqa_logits.ragged`; arguments are checked, q and k are uint8.

    Args:
        fill: write -inf outside a row's bounds; without, nothing is written there.
        enabled: int32 [1] on the GPU; with 0 in it nothing is computed and nothing written.
        workspace: bytes for what is decoded below SM89 (default 64 MiB); see `decoded_bytes`.
        configuration: one of `ragged_plan.configurations` for the architecture.
    """
    if not out.numel():
        return
    arch = architecture(q.device)
    chosen = configuration or planning.chosen(arch, q.shape[1], q.shape[2], len(k))
    q, k, weights = _padded(q, k, weights)
    k_scale, row_start, row_end = (x.contiguous() for x in (k_scale, row_start, row_end))
    rows = (weights, row_start, row_end, out)
    if native_fp8(arch):
        _launch(chosen, q.view(E4M3), k.view(E4M3), 0, k_scale, *rows, fill, enabled)
    else:
        _decode_and_launch(chosen, q, k, k_scale, *rows, fill, enabled, workspace)


def _decode_and_launch(
    chosen: Configuration,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor,
    fill: bool,
    enabled: Tensor | None,
    workspace: int | None,
) -> None:
    """In turns of so many keys and rows as may be decoded at a time."""
    rows, heads, dim = q.shape
    key_turn, row_turn = _turns(rows, heads, dim, len(k), workspace)
    q_room = q.new_empty((row_turn, heads, dim), dtype=torch.float16)
    k_room = k.new_empty((key_turn, dim), dtype=torch.float16)
    for begin in range(0, len(k), key_turn):
        keys = decode_codes(k[begin : begin + key_turn], k_room, enabled)
        for first in range(0, rows, row_turn):
            some = slice(first, first + row_turn)
            _launch(
                chosen, decode_codes(q[some], q_room, enabled), keys, begin, k_scale,
                weights[some], row_start[some], row_end[some], out[some], fill, enabled,
            )  # fmt: skip


def decoded_bytes(
    rows: int, heads: int, dim: int, keys: int, device: torch.device, workspace: int | None = None
) -> int:
    """Bytes that `ragged` takes for decoded codes, none from SM89 on; at most the workspace.

    (Or what one row and 64 keys need, where that is more.)
    """
    if native_fp8(architecture(device)):
        return 0
    heads, dim = _padded_sizes(heads, dim)
    key_turn, row_turn = _turns(rows, heads, dim, keys, workspace)
    return 2 * dim * (key_turn + row_turn * heads)


def _turns(rows: int, heads: int, dim: int, keys: int, workspace: int | None) -> tuple[int, int]:
    """Keys and rows that are decoded at a time, each in half of the workspace."""
    vectors = (DECODE_WORKSPACE if workspace is None else workspace) // (4 * dim)
    return min(max(vectors, _FEWEST_KEYS), keys), min(max(vectors // heads, 1), rows)


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
    heads, dim = _padded_sizes(*q.shape[1:])
    if heads * dim > planning.LARGEST_ROW:
        fix = f"heads times D at most {planning.LARGEST_ROW}, or impl='reference'"
        raise fault("q", f"shape {list(q.shape)} is too large a row", fix)
    more_heads, more_dim = heads - q.shape[1], dim - q.shape[2]
    if more_heads or more_dim:
        q = pad(q, (0, more_dim, 0, more_heads))
        k = pad(k, (0, more_dim))
        weights = pad(weights, (0, more_heads))
    return _aligned(q), _aligned(k), _aligned(weights)


def _padded_sizes(heads: int, dim: int) -> tuple[int, int]:
    return (
        max(_FEWEST_HEADS, 1 << (heads - 1).bit_length()),
        max(_SMALLEST_DIM, 1 << (dim - 1).bit_length()),
    )


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _VECTOR_BYTES == 0 else tensor.clone()
