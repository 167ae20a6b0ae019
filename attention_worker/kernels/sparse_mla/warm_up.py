"""Compile before the first token: run one batch of every kind that a session can need."""

from collections.abc import Callable

import torch
from torch import Tensor

from attention_worker.kernels.sparse_mla import plan as planning
from attention_worker.kernels.sparse_mla.launch import attend
from attention_worker.kernels.sparse_mla.layout import FP8_TOKEN_BYTES, LATENT, ROPE
from attention_worker.kernels.sparse_mla.plan import Plan
from attention_worker.kernels.sparse_mla.slots_map import to_slots
from indexer_service.kernels.architecture import architecture, processors

Progress = Callable[[int, int, str], None]


def warm_up(
    heads: int,
    k: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    *,
    page: int = 64,
    rope: bool = True,
    query_dtype: torch.dtype = torch.bfloat16,
    pages_apart: bool = False,
    batch_invariant: bool | None = None,
    progress: Progress | None = None,
) -> int:
    """Compile all that `attend` and `to_slots` need for a geometry; nothing compiles afterwards.

    Args:
        heads: of this rank, N.
        k: slots a token.
        cache_dtype: bf16 or fp16, or uint8 for fp8_ds_mla.
        device: a CUDA device.
        page: tokens a page.
        rope: whether heads have the rope part (size 576, else 512).
        query_dtype: of q and of the answer.
        pages_apart: blocks of the cache do not follow each other without a gap.
        batch_invariant: as for `attend`.
        progress: called before each batch with how many are done, how many there are, and what
            comes.

    Returns:
        How many batches ran. Compiled kernels stay in Triton's cache on disk.
    """
    batches = _one_of_each(heads, k, cache_dtype, device, batch_invariant)
    total = len(batches) + 1
    for done, (tokens, plan) in enumerate(batches.items()):
        if progress is not None:
            progress(done, total, f"{plan.form}, {plan.splits} splits, {tokens} tokens")
        width = LATENT + ROPE if rope else LATENT
        q = torch.zeros((tokens, heads, width), dtype=query_dtype, device=device)
        attend(
            (q,), _cache(cache_dtype, width, page, pages_apart, device),
            torch.zeros((tokens, k), dtype=torch.int32, device=device), 1.0, None,
            batch_invariant, torch.empty_like(q[..., :LATENT]),
            torch.empty((tokens, heads), dtype=torch.float32, device=device),
        )  # fmt: skip
    if progress is not None:
        progress(total - 1, total, "to_slots")
    one = torch.zeros((1, k), dtype=torch.int32, device=device)
    for count in (None, torch.zeros(1, dtype=torch.int32, device=device)):
        to_slots(one, one[0, :1], one[:, :1], page, None, count)
    return total


def _one_of_each(
    heads: int, k: int, cache_dtype: torch.dtype, device: torch.device, invariant: bool | None
) -> dict[int, Plan]:
    """Batch sizes that need different kernels, and their plans; larger ones need no others."""
    kinds: dict[tuple[object, ...], tuple[int, Plan]] = {}
    arch = architecture(device)
    units = processors(device)
    for tokens in range(1, 2 * units + 2):
        plan = planning.choose(
            tokens, heads, k, arch=arch, processors=units, fp8=cache_dtype == torch.uint8,
            aligned=True, splits=None, invariant=planning.batch_invariant(invariant),
        )  # fmt: skip
        kind = (plan.form, plan.block_heads, plan.buffers, plan.splits == 1, plan.fold)
        merged = None if plan.fold else planning.merge_kind(tokens * heads, plan.splits)
        kinds.setdefault((*kind, merged), (tokens, plan))
    return dict(kinds.values())


def _cache(
    dtype: torch.dtype, width: int, page: int, pages_apart: bool, device: torch.device
) -> Tensor:
    width = FP8_TOKEN_BYTES if dtype == torch.uint8 else width
    blocks = torch.zeros((4, page, width), dtype=dtype, device=device)
    return blocks[::2] if pages_apart else blocks
