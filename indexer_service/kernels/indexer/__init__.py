"""Scores and selection together, within a workspace of bounded memory: what callers use.

The selection is the same bits as `topk.select` over all scores of `mqa_logits` at once, whatever
the workspace is.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from indexer_service.kernels import mqa_logits
from indexer_service.kernels.architecture import on
from indexer_service.kernels.checks import expect, expect_rows, fault, positive
from indexer_service.kernels.dispatch import TRITON
from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.indexer import composed
from indexer_service.kernels.nan_seen import NanSeen

__all__ = ["select_paged", "select_ragged"]


def select_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    workspace: int | None = None,
    enabled: Tensor | None = None,
    settled: bool = False,
    epilogue: Epilogue | None = None,
    impl: str = "auto",
    on_stage: Callable[[str], None] | None = None,
    nan_rows: Tensor | None = None,
    nan: NanSeen | None = None,
) -> Tensor:
    """The k best keys of each row in a paged cache; `topk.select` says which and in what order.

    Args:
        q, k_cache, weights, seq_lens, block_table: as `mqa_logits.paged` takes them. Nobody may
            write lengths or table before the call is done: copy them first (`checked_inputs`) if
            somebody could.
        k: how many keys a row; may be more than it has.
        out: int32 [B*next_n, k] with contiguous rows, every element of it written.
        workspace: bytes that the temporaries of one window may take together (default 256 MiB).
            A budget below one page of keys for one request works with that. The reference's own
            tile (1 MiB) comes on top.
        enabled: int32 [1] on the tensors' device; with 0 in it nothing is computed and nothing
            written into `out`. It must not change before the call is done.
        settled: `enabled` was final before the kernel ahead of this call in the stream let this one
            start. With 0 in it, this call's kernels then return without waiting for that one:
            whoever comes behind them must not take their end for its end.
        epilogue: done once when `out` is written, on the device, if enabled: see
            `topk.kernel`. Not together with `settled`.
        impl: "auto", "triton", "reference", or what else `mqa_logits.paged` takes.
        on_stage: called with "logits" after each window's scores and with "topk" after its
            selection, in the caller's thread. What it raises abandons the selection and
            propagates; `out` may then hold anything.
        nan_rows: bool [rows]; set to True where a row's scores hold NaN, else left alone. Not
            with Triton, which keeps no scores.
        nan: where it is noted if a row's scores hold NaN, if enabled; the host need not look.

    Returns:
        int32 [B*next_n, k], positions in the request, ascending, -1 at the tail; only -1 for
        rows of length <= 0.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or k or workspace < 1.
    """
    mqa_logits.check_paged(q, k_cache, weights, seq_lens, block_table)
    out = _check_output(out, len(weights), k, q.device)
    _check_options(workspace, enabled, q.device)
    impl = mqa_logits.paged_implementation(impl, q, k_cache)
    told = _told_nan(nan_rows, impl, len(weights), q.device)
    tensors = (q, k_cache, weights, seq_lens, block_table)
    with on(q.device):
        _selects(impl).select_paged(
            *tensors, k, out, workspace, enabled, on_stage,
            settled=settled and enabled is not None, epilogue=epilogue, impl=impl, nan=nan, **told,
        )  # fmt: skip
    return out


def select_ragged(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    topk: int,
    *,
    out: Tensor | None = None,
    workspace: int | None = None,
    enabled: Tensor | None = None,
    impl: str = "auto",
    on_stage: Callable[[str], None] | None = None,
    nan_rows: Tensor | None = None,
    nan: NanSeen | None = None,
) -> Tensor:
    """The `topk` best of each row's keys among gathered ones; as `select_paged` otherwise.

    Args:
        q, k, k_scale, weights, row_start, row_end: as `mqa_logits.ragged` takes them.
        topk: how many keys a row.
        out: int32 [M, topk] with contiguous rows, every element of it written.
        workspace, enabled, impl, on_stage, nan_rows, nan: as for `select_paged`.

    Returns:
        int32 [M, topk], relative to row_start, ascending, -1 at the tail.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or topk or workspace < 1.
    """
    mqa_logits.check_ragged(q, k, k_scale, weights, row_start, row_end)
    out = _check_output(out, len(q), topk, q.device, name="topk")
    _check_options(workspace, enabled, q.device)
    impl = mqa_logits.ragged_implementation(impl, q)
    told = _told_nan(nan_rows, impl, len(q), q.device)
    tensors = (q, k, k_scale, weights, row_start, row_end)
    with on(q.device):
        _selects(impl).select_ragged(
            *tensors, topk, out, workspace, enabled, on_stage, impl=impl, nan=nan, **told
        )
    return out


def _selects(impl: str) -> ModuleType:
    """Where Triton computes both, its kernels work together; else one follows the other."""
    return import_module(f"{__name__}.fused") if impl == TRITON else composed


def _told_nan(
    nan_rows: Tensor | None, impl: str, rows: int, device: torch.device
) -> dict[str, Tensor | None]:
    """What only those take that have whole scores in memory."""
    if nan_rows is not None:
        if impl == TRITON:
            raise fault("nan_rows", "given, with Triton", "None: its kernels keep no scores")
        expect("nan_rows", nan_rows, "[rows]", (rows,), torch.bool, device)
    return {} if impl == TRITON else {"nan_rows": nan_rows}


def _check_output(
    out: Tensor | None, rows: int, k: int, device: torch.device, name: str = "k"
) -> Tensor:
    shape = (rows, positive(name, k))
    if out is None:
        return torch.full(shape, -1, dtype=torch.int32, device=device)
    return expect_rows("out", out, f"[rows, {name}]", shape, torch.int32, device)


def _check_options(workspace: int | None, enabled: Tensor | None, device: torch.device) -> None:
    if workspace is not None:
        positive("workspace", workspace)
    if enabled is not None:
        expect("enabled", enabled, "[1]", (1,), torch.int32, device)
