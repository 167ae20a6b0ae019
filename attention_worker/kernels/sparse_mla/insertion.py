"""What `sparse_mla.insert` means, in plain torch."""

from torch import Tensor

from attention_worker.kernels.sparse_mla.layout import encode_tokens


def insert(latent: Tensor, rope: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
    """See `sparse_mla.insert`; arguments are already checked."""
    blocks, page, _ = kv_cache.shape
    count = len(slots)
    inside = (slots >= 0) & (slots < blocks * page)
    slots = slots[inside]
    tokens = encode_tokens(latent[:count][inside], rope[:count][inside], kv_cache.dtype)
    kv_cache[slots // page, slots % page] = tokens
