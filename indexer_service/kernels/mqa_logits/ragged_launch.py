"""`mqa_logits.ragged` in Triton: from checked arguments to launched kernels."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from indexer_service.kernels.architecture import architecture, native_fp8, processors
from indexer_service.kernels.checks import E4M3, fault
from indexer_service.kernels.mqa_logits import ragged_plan as planning
from indexer_service.kernels.mqa_logits.decode_queries import decode_queries
from indexer_service.kernels.mqa_logits.ragged_plan import Configuration
from indexer_service.kernels.mqa_logits.ragged_tile import ragged_kernel

WORKSPACE_BYTES = 32 << 20
"""Decoded queries kept at a time, below SM89; more rows than fit are computed in turns."""

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
    chosen = configuration or planning.chosen(arch, *q.shape[1:])
    q, k, weights = _padded(q, k, weights)
    k_scale, row_start, row_end = (x.contiguous() for x in (k_scale, row_start, row_end))
    rows, heads, dim = q.shape
    turn = rows if native_fp8(arch) else max(1, WORKSPACE_BYTES // (2 * heads * dim))
    for begin in range(0, rows, turn):
        some = slice(begin, begin + turn)
        _launch(
            chosen, arch, q[some], k, k_scale, weights[some], row_start[some], row_end[some],
            out[some], fill, enabled,
        )  # fmt: skip


def _launch(
    chosen: Configuration,
    arch: int,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor,
    fill: bool,
    enabled: Tensor | None,
) -> None:
    rows, heads, dim = q.shape
    keys = len(k)
    native = native_fp8(arch)
    block_rows = planning.block_rows(rows, keys, chosen, processors(q.device))
    grid = (-(-keys // chosen.keys) * -(-rows // block_rows),)
    scalars = (rows, keys, block_rows, out.stride(0))
    constants: dict[str, Any] = dict(
        HEADS=heads, DIM=dim, ROWS=chosen.rows(heads), STAGES=chosen.stages,
        MOST_ROWS=planning.MOST_BLOCK_ROWS, FILL=fill, num_warps=chosen.warps,
    )  # fmt: skip
    if chosen.form == "hopper":
        from indexer_service.kernels.mqa_logits.ragged_hopper import hopper_kernel, operand

        part = 16 * chosen.warps
        q_rows = operand(q.view(E4M3).flatten(0, 1), chosen.rows(heads) * heads)
        hopper_kernel[grid](
            q_rows, operand(k.view(E4M3), part), k_scale, weights, row_start, row_end, out,
            enabled, *scalars, PARTS=chosen.keys // part, OVERLAP=chosen.overlap, **constants,
        )  # fmt: skip
        return
    if native:
        q, k = q.view(E4M3), k.view(E4M3)
    else:
        q = decode_queries(q)
    ragged_kernel[grid](
        q, k, k_scale, weights, row_start, row_end, out, enabled, *scalars, KEYS=chosen.keys,
        NATIVE=native, PACKED=q.device.type == "cuda", **constants,
    )  # fmt: skip


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
