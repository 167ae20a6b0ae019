"""`topk.select` in Triton, and the same for rows that a kernel before it left in one buffer."""

import torch
from torch import Tensor

from indexer_service.kernels.architecture import HOPPER, architecture, processors
from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.nan_seen import NanSeen
from indexer_service.kernels.topk import plan as planning
from indexer_service.kernels.topk.kernel import ENABLED, ROW_AT, ROW_END, ROW_START, topk_kernel
from indexer_service.kernels.topk.nan_kernel import tell_nan_kernel
from indexer_service.kernels.topk.plan import Plan

_VECTOR_BYTES = 16
_NAN_BLOCK = 1024


def select(
    scores: Tensor,
    k: int,
    row_start: Tensor | None,
    row_end: Tensor | None,
    out: Tensor,
    *,
    enabled: Tensor | None = None,
    nan: NanSeen | None = None,
) -> None:
    """See `topk.select`; arguments are already checked.

    enabled, nan: as for `select_packed`.
    """
    rows, width = scores.shape
    if not rows:
        return
    row_start, row_end = (
        None if bound is None else bound.contiguous() for bound in (row_start, row_end)
    )
    plan = planning.choose(rows, width, k, processors=processors(scores.device))
    run(
        plan, scores, k, out, row_start=row_start, row_end=row_end, enabled=enabled, nan=nan,
        arrived=_zeros(rows, scores.device) if plan.splits > 1 else None,
    )  # fmt: skip


def select_packed(
    scores: Tensor,
    row_at: Tensor,
    row_end: Tensor,
    arrived: Tensor,
    k: int,
    out: Tensor,
    *,
    longest: int,
    enabled: Tensor | None = None,
    settled: bool = False,
    epilogue: Epilogue | None = None,
    nan: NanSeen | None = None,
) -> None:
    """The same for rows that lie one after the other.

    Args:
        scores: fp32 [S].
        row_at: int64 [R], where each row begins; a negative one leaves the row's `out` alone.
        row_end: int32 [R], scores of each row; zero or less: only -1.
        arrived: int32 [R], zero; it is zero again afterwards.
        out: int32 [R, k] with contiguous rows.
        longest: no row is longer; decides nothing but how many programs share a row.
        enabled: int32 [1]; with 0 in it nothing is written.
        settled, epilogue, nan: as for `indexer.select_paged`.
    """
    if not len(row_at):
        return
    plan = planning.choose(len(row_at), longest, k, processors=processors(scores.device))
    has_room = architecture(scores.device) < planning.SHORT_OF_REGISTERS
    run(
        plan, scores, k, out, row_at=row_at, row_end=row_end, arrived=arrived, enabled=enabled,
        settled=settled, epilogue=epilogue if has_room else None, nan=nan,
    )  # fmt: skip
    if epilogue is not None and not has_room:
        epilogue.alone()


def run(
    plan: Plan,
    scores: Tensor,
    k: int,
    out: Tensor,
    *,
    row_at: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    arrived: Tensor | None = None,
    enabled: Tensor | None = None,
    settled: bool = False,
    epilogue: Epilogue | None = None,
    nan: NanSeen | None = None,
) -> None:
    """Launch the kernel as `plan` says; `arrived` may be missing if it says one split.

    From SM90 on it starts while the kernel before it in the stream ends, and waits for that itself.
    """
    device = scores.device
    shape = (plan.programs, plan.splits, 2, plan.capacity)
    candidates = torch.empty(shape, dtype=torch.float32, device=device)
    counts = torch.empty((plan.programs, plan.splits), dtype=torch.int32, device=device)
    given = sum(
        bit.value
        for bit, tensor in (
            (ROW_AT, row_at), (ROW_START, row_start), (ROW_END, row_end), (ENABLED, enabled),
        )
        if tensor is not None
    )  # fmt: skip
    width, stride = 0, 0
    if row_at is None:
        width, stride = scores.shape[1], scores.stride(0)
    skew = scores.data_ptr() % _VECTOR_BYTES // scores.element_size()
    hopper = device.type == "cuda" and architecture(device) >= HOPPER
    sizes = plan.sizes
    optional = (row_start, row_end, arrived, enabled)
    places = candidates.view(torch.int64) if row_at is None else row_at
    starts, ends, arrivals, switch = (counts if tensor is None else tensor for tensor in optional)
    if nan is not None and _nan_is_apart(device):
        tell_nan_kernel[(plan.programs,)](
            scores, places, starts, ends, switch, nan.word, given, width, len(out), stride,
            nan.mark, BLOCK=_NAN_BLOCK,
        )  # fmt: skip
        nan = None
    topk_kernel[(plan.programs, plan.splits)](
        scores, places, starts, ends, arrivals, switch, out, candidates, counts,
        counts if nan is None else nan.word, given, k, width, len(out), plan.groups, skew, stride,
        out.stride(0), 0 if nan is None else nan.mark,
        SMALL=sizes.small, TILE=sizes.tile, BLOCK=sizes.block, SAMPLE=sizes.sample,
        CAPACITY=sizes.capacity, MOST_SPLITS=planning.MOST_SPLITS, WARPS=sizes.warps,
        PTX=device.type == "cuda", NAN=nan is not None,
        STREAMS_NAN=nan is not None and sizes.streams_nan, SETTLED=settled, PDL=hopper,
        EPILOGUE=None if epilogue is None else epilogue.function,
        epilogue=None if epilogue is None else epilogue.arguments, num_warps=sizes.warps,
        maxnreg=sizes.registers, launch_pdl=hopper,
    )  # fmt: skip


def _nan_is_apart(device: torch.device) -> bool:
    return device.type == "cuda" and architecture(device) in planning.NAN_APART


def _zeros(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.int32, device=device)
