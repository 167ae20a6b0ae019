"""`mqa_logits.paged` in Triton, and the same into packed rows for the fused operation."""

from typing import Any

from torch import Tensor

from indexer_service.kernels import tuning
from indexer_service.kernels.architecture import HOPPER, architecture, native_fp8, processors
from indexer_service.kernels.checks import fault
from indexer_service.kernels.k_cache.layout import SCALE_BYTES, alignment
from indexer_service.kernels.mqa_logits import paged_plan
from indexer_service.kernels.mqa_logits.packed import PADDING, PackedScores, padded, span
from indexer_service.kernels.mqa_logits.paged_plan import Configuration
from indexer_service.kernels.mqa_logits.paged_portable import portable_kernel
from indexer_service.kernels.mqa_logits.paged_tails import fill_tails

OPERATION = "mqa_logits.paged"

_MAPPED_DIM = 128
"""The head size of the kernel that reads the cache through tensor maps."""

_SMALLEST_MAPPED_PAGE = 32
"""Its scales fill the 128 bytes that copies by tensor map are aligned to in shared memory."""

_VECTOR_BYTES = 16
"""The widest load."""


def paged_unsupported(q: Tensor, k_cache: Tensor) -> str | None:
    """Why `paged` and `paged_packed` cannot take these arguments, or None."""
    dim = q.shape[3]
    if dim < 64 or dim & (dim - 1):
        return f"D = {dim} is not a power of two from 64 up"
    if k_cache.data_ptr() % SCALE_BYTES or k_cache.stride(0) % SCALE_BYTES:
        return f"the pages do not lie at multiples of {SCALE_BYTES} bytes"
    return None


def paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    configuration: Configuration | None = None,
) -> None:
    """See `mqa_logits.paged`; arguments are checked, q is uint8, out's columns are the context."""
    if out.numel() == 0:
        return
    limit = min(out.shape[1], block_table.shape[1] * k_cache.shape[1])
    fill_tails(out, seq_lens, limit, q.shape[1])
    if limit > 0:
        _launch(q, k_cache, weights, seq_lens, block_table, out, limit, {}, configuration)


def paged_packed(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    packed: PackedScores,
    *,
    limit: int,
    window: int = 0,
    enabled: Tensor | None = None,
    settled: bool = False,
    configuration: Configuration | None = None,
) -> None:
    """Scores of one window's requests into rows that this lays out; see `packed`.

    Args:
        q, k_cache, weights, seq_lens, block_table: as `paged`, checked.
        packed: written: row_at, row_end and arrived of all rows, scores of this window's.
        limit: lengths above it (and above what the table has room for) are cut.
        window: its number; `packed.windows` says how many there are.
        enabled: int32 [1] on the device; with 0 in it nothing is written.
        settled: as for `indexer.select_paged`.
    """
    limit = min(limit, block_table.shape[1] * k_cache.shape[1])
    batch, next_n = q.shape[:2]
    needed = min(batch, 2) * next_n * padded(limit)
    if len(packed.scores) < needed:
        raise fault("packed", f"{len(packed.scores)} scores", f"give {needed} or more")
    if not batch:
        return
    step = span(len(packed.scores), next_n, limit)
    layout = dict(row_at=packed.row_at, row_end=packed.row_end, arrived=packed.arrived,
                  enabled=enabled, settled=settled, span=step, window=window)  # fmt: skip
    _launch(q, k_cache, weights, seq_lens, block_table, packed.scores, limit, layout, configuration)


def deciding(q: Tensor, k_cache: Tensor) -> dict[str, Any]:
    """What the choice of a configuration depends on: the arguments of `configurations`."""
    _, next_n, heads, dim = q.shape
    pages, page, _ = k_cache.shape
    mapped = alignment(k_cache) > 1 and dim == _MAPPED_DIM and pages > 0
    mapped = mapped and page >= _SMALLEST_MAPPED_PAGE and page & (page - 1) == 0
    return {
        "arch": architecture(q.device),
        "heads": paged_plan.columns(heads, next_n).heads,
        "next_n": next_n,
        "tensor_maps": mapped,
    }


def _launch(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    scores: Tensor,
    limit: int,
    layout: dict[str, Any],
    configuration: Configuration | None,
) -> None:
    """Args:
    layout: of packed rows; empty for rows that lie scores.stride(0) apart.
    """
    batch, next_n, heads, dim = q.shape
    arch = architecture(q.device)
    columns = paged_plan.columns(heads, next_n)
    if configuration is None:
        asked = deciding(q, k_cache)
        configuration = tuning.chosen(OPERATION, asked, paged_plan.configurations(**asked)[0])
    q = q.contiguous()
    if q.data_ptr() % _VECTOR_BYTES:
        q = q.clone()
    by_row = seq_lens.dim() == 2
    arguments: dict[str, Any] = dict(
        q=q, weights=weights, seq_lens=seq_lens, table=table, scores=scores,
        row_at=layout.get("row_at"), row_end=layout.get("row_end"),
        arrived=layout.get("arrived"), enabled=layout.get("enabled"), batch=batch, heads=heads,
        limit=limit, span=layout.get("span", 0), window=layout.get("window", 0),
        weight_row=weights.stride(0), weight_head=weights.stride(1),
        length_request=seq_lens.stride(0), length_row=seq_lens.stride(1) if by_row else 0,
        back=0 if by_row else 1, table_row=table.stride(0), table_column=table.stride(1),
        score_row=0 if layout else scores.stride(0), NEXT_N=next_n,
        LENGTHS=next_n if by_row else 1, HEADS=columns.heads, PAGE=k_cache.shape[1],
        PADDING=PADDING, BLOCK_N=configuration.block_keys, STAGES=configuration.stages,
        PROGRAMS=processors(q.device) * configuration.programs,
        SETTLED=layout.get("settled", False), num_warps=configuration.warps,
    )  # fmt: skip
    gpu = q.device.type == "cuda"
    if arch >= HOPPER and gpu:
        arguments["launch_pdl"] = True
    grid = (arguments["PROGRAMS"],)
    if configuration.kernel == "hopper":
        from indexer_service.kernels.mqa_logits.paged_hopper import hopper_kernel, tensor_maps

        hopper_kernel[grid](**arguments, **tensor_maps(k_cache, configuration.block_keys))
        return
    portable_kernel[grid](
        **arguments, cache=k_cache, pages=len(k_cache), page_stride=k_cache.stride(0),
        ROWS=columns.rows, GROUPS=columns.groups, D=dim,
        ALIGN=max(alignment(k_cache), SCALE_BYTES), NATIVE=native_fp8(arch), ASSEMBLY=gpu,
        PDL=arch >= HOPPER and gpu,
    )  # fmt: skip
