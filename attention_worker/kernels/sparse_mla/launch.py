"""`sparse_mla.attend` in Triton: from checked arguments to launched kernels."""

from typing import Any

import torch
from torch import Tensor

from attention_worker.kernels.sparse_mla import plan as planning
from attention_worker.kernels.sparse_mla.layout import LATENT
from attention_worker.kernels.sparse_mla.merge import merge_kernel
from attention_worker.kernels.sparse_mla.plan import Plan
from attention_worker.kernels.sparse_mla.split import split_kernel
from indexer_service.kernels.architecture import HOPPER, architecture, native_fp8, processors

_LOG2_E = 1.4426950408889634
_LAST_INT32 = 2**31 - 1
_VECTOR_BYTES = 16


def attend(
    parts: tuple[Tensor, ...],
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    num_kv_splits: int | None,
    batch_invariant: bool | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """See `sparse_mla.attend`; arguments are checked, the answer goes to `out` and `lse`."""
    tokens, heads, _ = parts[0].shape
    k = slots.shape[1]
    if not (tokens and heads and k and kv_cache.numel()):
        out.zero_()
        lse.fill_(-torch.inf)
        return
    arch = architecture(parts[0].device)
    plan = planning.choose(
        tokens, heads, k, arch=arch, processors=processors(parts[0].device),
        fp8=kv_cache.dtype == torch.uint8, aligned=_vector(kv_cache) > 1, splits=num_kv_splits,
        invariant=planning.batch_invariant(batch_invariant),
    )  # fmt: skip
    latent, rope = _query_parts(parts)
    if slots.stride(1) != 1:
        slots = slots.contiguous()
    turn = planning.turns(plan, tokens, heads, processors(parts[0].device))
    for begin in range(0, tokens, turn):
        some = slice(begin, begin + turn)
        _launch(
            plan, arch, latent[some], None if rope is None else rope[some], kv_cache,
            slots[some], scale, out[some], lse[some],
        )  # fmt: skip


def _launch(
    plan: Plan,
    arch: int,
    latent: Tensor,
    rope: Tensor | None,
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    tokens, heads, _ = latent.shape
    single = plan.splits == 1
    head_blocks = -(-heads // plan.block_heads)
    shape: tuple[int, ...] = (1,) if single or plan.fold else (tokens, plan.splits, heads)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    # In the cache's own precision: a split's output is a weighted mean of what is cached, so that
    # it is in range, and the merge reads half of what fp32 would take.
    kept = torch.bfloat16 if kv_cache.dtype == torch.uint8 else kv_cache.dtype
    partial = torch.empty((*shape, LATENT), dtype=kept, device=out.device)
    blocks, page, _ = kv_cache.shape
    block_stride, token_stride, _ = kv_cache.stride()
    dependent = arch >= HOPPER
    has_rope = rope is not None
    if rope is None:
        rope = latent
    arguments: dict[str, Any] = dict(
        latent=latent, rope=rope, cache=kv_cache, slots=slots, out=out, lse=lse, partial=partial,
        partial_lse=partial_lse, scale=scale * _LOG2_E, heads=heads, k=slots.shape[1],
        per_split=plan.per_split, splits=plan.splits,
        last_slot=min(blocks * page - 1, _LAST_INT32), page=page, block_stride=block_stride,
        token_stride=token_stride, latent_token=latent.stride(0), latent_head=latent.stride(1),
        rope_token=rope.stride(0), rope_head=rope.stride(1), slots_token=slots.stride(0),
        out_token=out.stride(0), out_head=out.stride(1), BLOCK_H=plan.block_heads,
        BLOCK_N=plan.block_tokens, PAGED=block_stride != page * token_stride and blocks > 1,
        SINGLE=single, num_warps=plan.warps,
    )  # fmt: skip
    if plan.form == "spread":
        _spread(plan, tokens * head_blocks, arguments | {"ROPE": has_rope})
    else:
        kernel, constants = _kernel(plan, arch, kv_cache, has_rope)
        grid = (tokens * -(-plan.splits // plan.per_program) * head_blocks,)
        kernel[grid](**arguments, PDL=dependent, **constants)
    merged = planning.merge_kind(tokens * heads, plan.splits)
    if merged is not None and not plan.fold:
        room, columns, warps = merged
        merge_kernel[(tokens * heads, LATENT // columns)](
            out, lse, partial, partial_lse, heads, plan.splits, out.stride(0), out.stride(1),
            MAX_SPLITS=room, COLUMNS=columns, IN_ORDER=plan.invariant, PDL=dependent,
            num_warps=warps, maxnreg=planning.merge_registers(room),
            **({"launch_pdl": True} if dependent else {}),
        )  # fmt: skip


def _spread(plan: Plan, rows: int, arguments: dict[str, Any]) -> None:
    """The two kernels of this form; rows: tokens times blocks of heads."""
    from attention_worker.kernels.sparse_mla.hopper_spread import outputs_kernel, scores_kernel

    tiles = rows * -(-arguments["k"] // plan.block_tokens)
    arguments |= dict(
        scores=torch.empty(
            (tiles, plan.block_heads, plan.block_tokens), device=arguments["out"].device
        ),
        COLUMNS=planning.SPREAD_COLUMNS, BUFFERS=plan.buffers,
    )  # fmt: skip
    scores_kernel[(tiles,)](**_of(scores_kernel, arguments))
    grid = (rows * plan.splits * LATENT // planning.SPREAD_COLUMNS,)
    outputs_kernel[grid](**_of(outputs_kernel, arguments), launch_pdl=True)


def _of(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a kernel has."""
    return {name: arguments[name] for name in kernel.arg_names}


def _kernel(plan: Plan, arch: int, kv_cache: Tensor, rope: bool) -> tuple[Any, dict[str, int]]:
    """The kernel of the plan's form, and its own constants."""
    if plan.form == "wide":
        from attention_worker.kernels.sparse_mla.hopper_wide import wide_kernel

        return wide_kernel, {"per_program": plan.per_program, "ROPE": rope}
    if plan.form == "narrow":
        from attention_worker.kernels.sparse_mla.hopper_narrow import narrow_kernel

        return narrow_kernel, {
            "per_program": plan.per_program, "ROPE": rope, "BUFFERS": plan.buffers,
            "FOLD": plan.fold,
        }  # fmt: skip
    if plan.form == "fp8":
        from attention_worker.kernels.sparse_mla.hopper_fp8 import fp8_kernel

        constants = {
            "per_program": plan.per_program, "BUFFERS": plan.buffers, "FOLD": plan.fold,
        }  # fmt: skip
        # Two programs of eight warps share a multiprocessor's registers.
        return fp8_kernel, constants | ({"maxnreg": 128} if plan.block_heads == 16 else {})
    return split_kernel, {
        "ROPE": rope,
        "STAGES": plan.buffers,
        "FP8": kv_cache.dtype == torch.uint8,
        "NATIVE": native_fp8(arch),
        "VECTOR": _vector(kv_cache),
    }


def _vector(kv_cache: Tensor) -> int:
    """Elements that every cached token is aligned to: 16 bytes of them, or one."""
    elements = _VECTOR_BYTES // kv_cache.element_size()
    aligned = kv_cache.data_ptr() % _VECTOR_BYTES == 0
    if aligned and kv_cache.stride(0) % elements == 0 and kv_cache.stride(1) % elements == 0:
        return elements
    return 1


def _query_parts(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Latent and rope part as the kernels read them: rows whole and aligned, else copied."""
    latent = _aligned(parts[0][..., :LATENT])
    if len(parts) == 2:
        return latent, _aligned(parts[1])
    return latent, _aligned(parts[0][..., LATENT:]) if parts[0].shape[2] > LATENT else None


def _aligned(part: Tensor) -> Tensor:
    token, head, value = part.stride()
    if value == 1 and not (part.data_ptr() % _VECTOR_BYTES or token % 16 or head % 16):
        return part
    return part.clone(memory_format=torch.contiguous_format)
