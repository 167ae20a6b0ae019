"""What `sparse_mla.attend` and `sparse_mla.to_slots` mean, in plain torch."""

import torch
from torch import Tensor

from attention_worker.kernels.sparse_mla.layout import LATENT, ROPE, decode_tokens

_CHUNK_BYTES = 32 << 20
"""Of gathered fp32 tokens; how many query tokens are computed at a time follows from it."""


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
    """See `sparse_mla.attend`; arguments are checked, `parts` are q's along its last axis.

    The answer goes to `out` and `lse`. Each token is computed alone: always batch-invariant.
    """
    tokens = len(out)
    chunk = max(1, _CHUNK_BYTES // (4 * (LATENT + ROPE) * max(slots.shape[1], 1)))
    for begin in range(0, tokens, chunk):
        some = slice(begin, begin + chunk)
        q = torch.cat([part[some].to(torch.float32) for part in parts], dim=-1)
        kv, valid = _gather(kv_cache, slots[some])
        scores = torch.matmul(q, kv.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~valid.unsqueeze(1), -torch.inf)
        lse[some] = scores.logsumexp(-1)
        weights = scores.softmax(-1).masked_fill_(~valid.any(1).view(-1, 1, 1), 0.0)
        out[some] = torch.matmul(weights, kv[..., :LATENT]).to(out.dtype)


def _gather(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 tokens [t, k, width], zeros where a slot is invalid, and bool [t, k]."""
    blocks, page, _ = kv_cache.shape
    valid = (slots >= 0) & (slots < blocks * page)
    chosen = slots[valid].to(torch.int64)
    kv = torch.zeros(
        (*slots.shape, _decoded_width(kv_cache)), dtype=torch.float32, device=slots.device
    )
    kv[valid] = decode_tokens(kv_cache[chosen // page, chosen % page])
    return kv, valid


def _decoded_width(kv_cache: Tensor) -> int:
    return LATENT + ROPE if kv_cache.dtype == torch.uint8 else kv_cache.shape[2]


def to_slots(
    indices: Tensor,
    request_of_token: Tensor,
    block_table: Tensor,
    page: int,
    pages: int | None,
    invalid_count: Tensor | None,
) -> Tensor:
    """See `sparse_mla.to_slots`; arguments are already checked."""
    requests, columns = block_table.shape
    position = indices.to(torch.int64)
    request = request_of_token.to(torch.int64).unsqueeze(1).expand_as(position)
    inside = (request >= 0) & (request < requests) & (position >= 0) & (position < columns * page)

    numbers = torch.full_like(position, -1)
    numbers[inside] = block_table[request[inside], position[inside] // page].to(torch.int64)
    slots = numbers * page + position % page
    usable = inside & (numbers >= 0) & (slots <= torch.iinfo(torch.int32).max)
    if pages is not None:
        usable &= numbers < pages
    if invalid_count is not None:
        invalid_count += (~usable & (indices != -1)).sum().to(torch.int32)
    return torch.where(usable, slots, -1).to(torch.int32)
