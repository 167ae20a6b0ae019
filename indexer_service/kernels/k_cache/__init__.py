"""Write and read the indexer's K cache (layout: `layout.py`; meaning: `reference.py`)."""

import torch
from torch import Tensor

from indexer_service.kernels.checks import expect, fault
from indexer_service.kernels.dispatch import Operation
from indexer_service.kernels.k_cache.layout import check_k_cache

__all__ = ["gather", "insert"]

_HERE = "indexer_service.kernels.k_cache"
_insert = Operation(
    "k_cache.insert", reference=f"{_HERE}.reference:insert", triton=f"{_HERE}.insertion:insert"
)
_gather = Operation(
    "k_cache.gather", reference=f"{_HERE}.reference:gather", triton=f"{_HERE}.gathering:gather"
)


def insert(
    k: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    *,
    replica: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Quantises keys to e4m3 with one power-of-two scale each and writes them to their slots.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)), value = clamp(k / scale, -448, 448), rounded to
    nearest even. `amax` is the largest finite magnitude: an infinity saturates to +-448 and a NaN
    becomes code 0x7F, and neither spoils the other values of its key. These are the bytes that
    vLLM writes, and the same from every implementation.

    Args:
        k: bf16 or fp16 [T, D].
        slots: int64 [S], S <= T (a batch padded for a graph has more keys than slots): page
            number times page size plus place in the page. Slots outside the cache, above all -1,
            are skipped. No slot may come twice.
        k_cache: uint8 [pages, page, D+4], pages at any stride(0); written in place.
        replica: a second cache of the same shape, pages at any stride(0), that gets the same
            bytes. It may be on another GPU that this one has peer access to; the first call with
            such a pair opens the access and cannot be captured.
        impl: "auto", "triton" or "reference".

    Raises:
        ValueError: a shape, dtype, device or stride is wrong.
    """
    dim = check_k_cache(k_cache)
    expect("k", k, "[T, D]", (None, dim), (torch.bfloat16, torch.float16), k_cache.device)
    expect("slots", slots, "[S]", (None,), torch.int64, k_cache.device)
    if len(slots) > len(k):
        raise fault("slots", f"{len(slots)} slots for {len(k)} keys", "give at most one a key")
    if replica is not None:
        _check_replica(replica, k_cache)
    _insert.implementation(impl, k_cache.device)(k, slots, k_cache, replica)


def _check_replica(replica: Tensor, k_cache: Tensor) -> None:
    shape = tuple(k_cache.shape)
    expect("replica", replica, "as k_cache", shape, torch.uint8)
    check_k_cache(replica, name="replica")
    if replica.device.type != k_cache.device.type:
        wrong = f"on {replica.device}, k_cache on {k_cache.device}"
        raise fault("replica", wrong, "give memory of a device of the same type")


def gather(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    total: int | None = None,
    enabled: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The first `seq_lens[r]` keys of each request, one request after the other.

    Without `total` the result's size depends on the lengths: the call reads them on the host,
    waits for the device, and cannot be captured.

    Args:
        k_cache: uint8 [pages, page, D+4], pages at any stride(0).
        block_table: int32 [R, n], page numbers. A page outside the cache is not read: its keys
            have NaN scales and any values.
        seq_lens: int32 [R]; zero or less gives nothing.
        total: how many keys the result has room for; the lengths stay on the device. Keys behind
            the lengths' sum are any bytes, and keys behind `total` are left out.
        enabled: int32 [1] on the cache's device; with 0 in it nothing is read, and the keys are
            any bytes. Needs `total`.
        impl: "auto", "triton" or "reference". (The reference reads lengths on the host.)

    Returns:
        values float8_e4m3fn [N, D] and scales fp32 [N], N = `total` or the sum of the lengths.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or (without `total`) a length needs
            more pages than a row of `block_table` has.
    """
    check_k_cache(k_cache)
    expect("block_table", block_table, "[R, n]", (None, None), torch.int32, k_cache.device)
    requests, columns = block_table.shape
    expect("seq_lens", seq_lens, "[R]", (requests,), torch.int32, k_cache.device)
    if enabled is not None:
        expect("enabled", enabled, "[1]", (1,), torch.int32, k_cache.device)
    if total is None:
        if enabled is not None:
            raise fault("total", "None beside `enabled`", "give a bound, so that nothing is read")
        room = columns * k_cache.shape[1]
        lengths = seq_lens.tolist()
        longest = max(lengths, default=0)
        if longest > room:
            wrong = f"length {longest}, but a row of block_table holds {room} tokens"
            raise fault("seq_lens", wrong, "give a table that covers every length")
        total = sum(length for length in lengths if length > 0)
    elif total < 0:
        raise fault("total", f"{total} keys", "0 or more")
    run = _gather.implementation(impl, k_cache.device)
    values, scales = run(k_cache, block_table, seq_lens, total, enabled)
    return values, scales
