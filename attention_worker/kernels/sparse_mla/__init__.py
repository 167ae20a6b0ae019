"""Sparse multi-head latent attention: every token attends to the cache slots chosen for it.

With K = V's latent part: out[t, n] = softmax_j(scale * q[t, n] . kv[slots[t, j]]) @ kv[..., :512].
`reference.py` is the plain-torch meaning, `launch.py` the Triton implementation; `warm_up.warm_up`
compiles the latter for a session.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from attention_worker.kernels.sparse_mla.layout import FP8_TOKEN_BYTES, LATENT, ROPE
from indexer_service.kernels.checks import expect, fault, positive
from indexer_service.kernels.dispatch import Operation

__all__ = ["attend", "insert", "to_slots"]

_HERE = "attention_worker.kernels.sparse_mla"
_attend = Operation(
    "sparse_mla.attend", reference=f"{_HERE}.reference:attend", triton=f"{_HERE}.launch:attend"
)
_to_slots = Operation(
    "sparse_mla.to_slots",
    reference=f"{_HERE}.reference:to_slots",
    triton=f"{_HERE}.slots_map:to_slots",
)
# An engine on a GPU writes its cache itself.
_insert = Operation("sparse_mla.insert", reference=f"{_HERE}.insertion:insert")

_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CACHE_DTYPES = (torch.bfloat16, torch.float16)


@overload
def attend(
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    *,
    return_lse: Literal[False] = False,
    num_kv_splits: int | None = None,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor: ...


@overload
def attend(
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    *,
    return_lse: Literal[True],
    num_kv_splits: int | None = None,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def attend(
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    *,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    batch_invariant: bool | None = None,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T tokens and N heads over k slots a token.

    Args:
        q: [T, N, 576] (latent, then rope part), [T, N, 512] (no rope part), or the pair
            (latent [T, N, 512], rope [T, N, 64]); bf16, fp16 or fp32, any strides.
        kv_cache: [blocks, page, 576 or 512] bf16 or fp16, as wide as q; or uint8
            [blocks, page, 656] (vLLM's fp8_ds_mla: 512 e4m3, four fp32 scales, one for each 128
            values, 64 bf16 rope values). Any strides, but a token's bytes lie together.
            A code that is NaN makes rows NaN that attend to it.
        slots: int32 [T, k], block number times page plus place. Slots outside the cache, above
            all -1, take no part, wherever in the row they stand. No slot may come twice in a row.
        scale: factor of the dot products.
        return_lse: also return the logarithm of the softmax's sum.
        num_kv_splits: in how many parts to split a token's slots (None: the implementation
            chooses; 1: one pass). The reference has no parts and only checks it.
        batch_invariant: a row's bits do not depend on the batch around it (None: as vLLM's
            VLLM_BATCH_INVARIANT says). Without it the same batch still gives the same bits.
        out: [T, N, 512] in q's dtype, stride(2) 1, to write the answer into.
        impl: "auto", "reference" or "triton" ("auto" means it on CUDA devices).

    Returns:
        [T, N, 512] in q's dtype (`out` if given), zeros for a token without a valid slot. With
        `return_lse` also fp32 [T, N], natural logarithm, -inf for such a token. What a slot that
        takes no part holds, NaN too, does not matter.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong.
    """
    parts = _check_query(q)
    tokens, device = len(parts[0]), parts[0].device
    _check_cache(kv_cache, sum(part.shape[2] for part in parts), device)
    expect("slots", slots, "[T, k]", (tokens, None), torch.int32, device)
    if num_kv_splits is not None:
        positive("num_kv_splits", num_kv_splits)
    attention = _attend.implementation(impl, device)
    shape = (*parts[0].shape[:2], LATENT)
    if out is None:
        out = torch.empty(shape, dtype=parts[0].dtype, device=device)
    expect("out", out, "[T, N, 512]", shape, parts[0].dtype, device)
    if out.stride(2) != 1:
        raise fault("out", f"stride(2) is {out.stride(2)}, not 1", "keep a head's values whole")
    lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
    attention(parts, kv_cache, slots, float(scale), num_kv_splits, batch_invariant, out, lse)
    return (out, lse) if return_lse else out


def to_slots(
    indices: Tensor,
    request_of_token: Tensor,
    block_table: Tensor,
    page: int,
    *,
    pages: int | None = None,
    invalid_count: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Positions in a request -> slots in the cache, for `attend`.

    Args:
        indices: int32 [T, k], positions; -1 stays -1.
        request_of_token: int32 [T], row of `block_table` of each token.
        block_table: int32 [R, n], page numbers.
        page: tokens a page.
        pages: pages of the cache; page numbers from it on are invalid (None: no upper bound).
        invalid_count: int32 [1]; the number of indices that could not be mapped, because
            request, position or page is out of range, is added to it. Those too become -1.
        impl: "auto", "reference" or "triton".

    Returns:
        int32 [T, k].

    Raises:
        ValueError: a shape, dtype or device is wrong, or page < 1.
    """
    device = expect("indices", indices, "[T, k]", (None, None), torch.int32).device
    expect("request_of_token", request_of_token, "[T]", (len(indices),), torch.int32, device)
    expect("block_table", block_table, "[R, n]", (None, None), torch.int32, device)
    positive("page", page)
    if pages is not None and pages < 0:
        raise fault("pages", f"{pages} is negative", "give the pages of the cache")
    if invalid_count is not None:
        expect("invalid_count", invalid_count, "[1]", (1,), torch.int32, device)
    mapping = _to_slots.implementation(impl, device)
    slots: Tensor = mapping(indices, request_of_token, block_table, page, pages, invalid_count)
    return slots


def insert(
    latent: Tensor, rope: Tensor, slots: Tensor, kv_cache: Tensor, *, impl: str = "auto"
) -> None:
    """Writes tokens to their slots, in the cache's own form.

    Args:
        latent: [T, 512], rope: [T, 64]; bf16, fp16 or fp32.
        slots: int64 [S], S <= T: block number times page plus place. Slots outside the cache,
            above all -1, are skipped. No slot may come twice.
        kv_cache: as for `attend`; written in place.
        impl: "auto" or "reference".

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    device = expect("latent", latent, "[T, 512]", (None, LATENT), _QUERY_DTYPES).device
    expect("rope", rope, "[T, 64]", (len(latent), ROPE), latent.dtype, device)
    expect("slots", slots, "[S]", (None,), torch.int64, device)
    if len(slots) > len(latent):
        wrong = f"{len(slots)} slots for {len(latent)} tokens"
        raise fault("slots", wrong, "give at most one a token")
    _check_cache(kv_cache, LATENT + ROPE, device)
    _insert.implementation(impl, device)(latent, rope, slots, kv_cache)


def _check_query(q: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The parts of q along its last axis: one tensor, or latent and rope."""
    if isinstance(q, Tensor):
        expect("q", q, "[T, N, 576 or 512]", (None, None, None), _QUERY_DTYPES)
        if q.shape[2] not in (LATENT + ROPE, LATENT):
            wrong = f"shape {list(q.shape)} is neither [T, N, 576] nor [T, N, 512]"
            raise fault("q", wrong, "give latent and rope part, or the latent part alone")
        return (q,)
    latent, rope = q
    expect("q[0]", latent, "[T, N, 512]", (None, None, LATENT), _QUERY_DTYPES)
    shape = (*latent.shape[:2], ROPE)
    expect("q[1]", rope, "[T, N, 64]", shape, latent.dtype, latent.device)
    return latent, rope


def _check_cache(kv_cache: Tensor, query_width: int, device: torch.device) -> None:
    if kv_cache.dtype == torch.uint8:
        width, dtypes = FP8_TOKEN_BYTES, [torch.uint8]
        if query_width != LATENT + ROPE:
            wrong = f"{FP8_TOKEN_BYTES}-byte tokens have a rope part, q has none"
            raise fault("kv_cache", wrong, "give q [T, N, 576]")
    else:
        width, dtypes = query_width, list(_CACHE_DTYPES)
    layout = f"[blocks, page, {width}]"
    expect("kv_cache", kv_cache, layout, (None, None, width), dtypes, device)
    if kv_cache.shape[1] < 1:
        raise fault("kv_cache", "pages hold no tokens", f"give {layout}")
    if kv_cache.stride(2) != 1:
        raise fault("kv_cache", f"stride(2) is {kv_cache.stride(2)}, not 1", "keep tokens whole")
    if kv_cache.dtype == torch.uint8 and any(stride % 16 for stride in kv_cache.stride()[:2]):
        wrong = f"strides {kv_cache.stride()} put tokens at other bytes than multiples of 16"
        raise fault("kv_cache", wrong, "keep scales and rope values aligned")
