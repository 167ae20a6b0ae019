"""One layer of one step of a batch, as the service and the worker's fallback both compute it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from indexer_service.kernels import indexer
from indexer_service.kernels.checks import expect, expect_rows, fault
from indexer_service.kernels.epilogue import Epilogue
from indexer_service.kernels.k_cache import gather
from indexer_service.kernels.k_cache.layout import check_k_cache
from indexer_service.kernels.nan_seen import NanSeen

NEGATIVE_LENGTH = "negative_length"
LENGTH_OUT_OF_BOUNDS = "length_out_of_bounds"
PAGE_OUT_OF_BOUNDS = "page_out_of_bounds"
TORN_INPUT = "torn_input"
QUERY_OFFSETS = "query_offsets"


@dataclass(frozen=True)
class RowFault:
    """Why a request's rows cannot be computed.

    Attributes:
        request: its place in the batch.
        reason: one of the constants above.
        expected: torn_input, query_offsets: the right value; otherwise the bound that was broken.
        seen: the value found.
    """

    request: int
    reason: str
    expected: int
    seen: int


def find_faults(
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    pages: int,
    page_size: int,
    max_length: int | None = None,
    exact_seq_lens: Tensor | None = None,
) -> list[RowFault]:
    """Requests whose lengths or pages must not be used, at most one fault each, in order.

    In order of what is reported: torn_input (a length differs from its exact value),
    query_offsets (they run backwards), negative_length, length_out_of_bounds (beyond the table's
    row, the cache or `max_length`), page_out_of_bounds (only pages that the length needs are looked
    at).
    If another process can write the inputs, copy them and give `select_step` the same copies.

    Args:
        query_start: int32 [R+1]; seq_lens: int32 [R]; block_table: int32 [R, n].
        pages, page_size: of the smallest K cache that the step reads.
        max_length: the step's bound on lengths, where it has one.
        exact_seq_lens: int32 [R], the lengths as the CPU knows them, where it does.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    device = _check_batch(query_start, seq_lens, block_table)
    requests, columns = block_table.shape
    lengths = seq_lens.to(torch.int64)
    table = block_table.to(torch.int64)
    limit = min(columns * page_size, pages * page_size)
    limit = limit if max_length is None else min(limit, max_length)

    offsets = query_start.to(torch.int64)
    needed = -(-lengths.clamp(0, limit) // page_size)
    column = torch.arange(columns, device=device)
    wrong_page = ((table < 0) | (table >= pages)) & (column < needed.unsqueeze(1))
    first_wrong = wrong_page.to(torch.int8).argmax(1) if columns else torch.zeros_like(lengths)
    page_seen = table.gather(1, first_wrong.unsqueeze(1)).squeeze(1) if columns else lengths
    zero, bound = torch.zeros_like(lengths), torch.full_like(lengths, limit)

    checks = [
        (offsets[1:] < offsets[:-1], QUERY_OFFSETS, offsets[:-1], offsets[1:]),
        (lengths < 0, NEGATIVE_LENGTH, zero, lengths),
        (lengths > limit, LENGTH_OUT_OF_BOUNDS, bound, lengths),
        (wrong_page.any(1), PAGE_OUT_OF_BOUNDS, torch.full_like(lengths, pages), page_seen),
    ]
    if exact_seq_lens is not None:
        exact = expect("exact_seq_lens", exact_seq_lens, "[R]", (requests,), torch.int32, device)
        checks.insert(0, (exact != seq_lens, TORN_INPUT, exact, lengths))

    found: dict[int, RowFault] = {}
    for broken, reason, expected, seen in checks:
        for request in broken.nonzero().flatten().tolist():
            values = (int(expected[request]), int(seen[request]))
            found.setdefault(request, RowFault(request, reason, *values))
    return [found[request] for request in sorted(found)]


def select_step(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    k: int,
    *,
    decode_requests: int,
    rows_per_decode: int,
    out: Tensor,
    max_length: int | None = None,
    skip_requests: Sequence[int] = (),
    workspace: int | None = None,
    on_stage: Callable[[str], None] | None = None,
    impl: str = "auto",
    nan_rows: Tensor | None = None,
) -> None:
    """Selects k keys for each row of a step: decode requests first, then prefill requests.

    Row j of a request's n rows sees its first L - n + 1 + j keys, L its length after its last
    row. Give in `skip_requests` what `find_faults` found: those rows get only -1, their lengths
    and pages are not used, and all other rows are right. Rows of no request get only -1 too.
    A prefill request's keys are gathered first: D+4 bytes a token of one request, at a time,
    beside `workspace`.

    Args:
        q: e4m3 [T, H, D] (float8_e4m3fn, or its bytes as uint8); weights: fp32 [T, H].
        k_cache: uint8 [pages, page, D+4], this layer's K cache.
        query_start: int32 [R+1], first row of each request; seq_lens: int32 [R].
        block_table: int32 [R, n], page numbers.
        k: how many keys a row.
        decode_requests: the first so many requests have `rows_per_decode` rows each.
        out: int32 [T, k] with contiguous rows, every element of it written.
        max_length: no length is above it; a table wider than that is not looked at further on.
        workspace, on_stage, impl: as for `indexer.select_paged`.
        nan_rows: bool [T], as there.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, the decode rows are more than T,
            or a prefill request that is not skipped has a length beyond its table's row.
    """
    device = _check_batch(query_start, seq_lens, block_table)
    check_k_cache(k_cache, device)
    page = k_cache.shape[1]
    rows, requests = len(q), len(seq_lens)
    expect_rows("out", out, "[T, k]", (rows, k), torch.int32, device)
    decode_rows = decode_requests * rows_per_decode
    if not 0 <= decode_requests <= requests:
        wrong = f"{decode_requests} of {requests} requests"
        raise fault("decode_requests", wrong, "give 0 to all of them")
    if rows_per_decode < 0 or decode_rows > rows:
        wrong = f"{decode_requests} requests of {rows_per_decode} rows, but q has {rows}"
        raise fault("rows_per_decode", wrong, "give decode requests equal rows, at the front")

    if max_length is not None:
        block_table = block_table[:, : max(-(-max_length // page), 1)]
    skipped = set(skip_requests)
    if not skipped <= set(range(requests)):
        raise fault("skip_requests", f"{sorted(skipped)} of {requests} requests", "give 0 to R-1")
    lengths = seq_lens.clone()
    if skipped:
        lengths[sorted(skipped)] = 0
    out.fill_(-1)

    if decode_rows:
        _select_decode(
            q[:decode_rows], weights[:decode_rows], k_cache, lengths[:decode_requests],
            block_table[:decode_requests], k, out=out[:decode_rows],
            workspace=workspace, on_stage=on_stage, impl=impl,
            nan_rows=None if nan_rows is None else nan_rows[:decode_rows],
        )  # fmt: skip
    starts, bounds = query_start.tolist(), lengths.tolist()
    for request in range(decode_requests, requests):
        begin, end = max(starts[request], decode_rows), min(starts[request + 1], rows)
        if request in skipped or begin >= end:
            continue
        one, some = slice(request, request + 1), slice(begin, end)
        row = torch.arange(begin, end, device=device)  # 64 bit: the offsets may be garbage
        seen = (row + lengths[one] + (1 - starts[request + 1])).clamp_min(0).to(torch.int32)
        if bounds[request] > block_table.shape[1] * page:
            wrong = f"length {bounds[request]}, but a row of block_table holds less"
            raise fault("seq_lens", wrong, "give a table that covers every length")
        _select_prefill(
            q[some], weights[some], k_cache, lengths[one], block_table[one], k, seen,
            max(bounds[request], 0), out=out[some],
            workspace=workspace, on_stage=on_stage, impl=impl,
            nan_rows=None if nan_rows is None else nan_rows[some],
        )  # fmt: skip


def enqueue_step(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    k: int,
    *,
    decode_requests: int,
    rows_per_decode: int,
    offsets: Sequence[int],
    length_bounds: Sequence[int],
    row_ends: Tensor | None,
    out: Tensor,
    enabled: Tensor | None = None,
    settled: bool = False,
    epilogue: Epilogue | None = None,
    workspace: int | None = None,
    on_stage: Callable[[str], None] | None = None,
    impl: str = "auto",
    nan: NanSeen | None = None,
) -> None:
    """As `select_step`, but the host reads nothing of the device: it enqueues, and can be captured.

    Lengths and table are those of `device_inputs.copy_checked`, which gave length 0 to what must
    not be computed.

    Args:
        q: e4m3 [T, H, D] (or bytes); weights: fp32 [T, H]; k_cache: uint8 [pages, page, D+4].
        seq_lens: int32 [R]; block_table: int32 [R, n], both on the device.
        k: how many keys a row.
        decode_requests: the first so many requests have `rows_per_decode` rows each.
        offsets: [R+1], first row of each request, as the host knows them; the last one is T.
        length_bounds: [R], at least the lengths (the lengths themselves, where they are known).
            Only those of prefill requests are read.
        row_ends: int32 [T], keys that each row of a prefill request sees; None without any.
        out: int32 [T, k] with contiguous rows, every element of it written if enabled.
        enabled: int32 [1] on the device; with 0 in it nothing is computed and nothing written.
        settled: as for `indexer.select_paged`; of decode requests.
        epilogue, workspace, on_stage, impl, nan: as for `indexer.select_paged`.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong, or offsets contradict the others.
    """
    requests, rows = len(seq_lens), len(q)
    decode_rows = decode_requests * rows_per_decode
    if len(offsets) != requests + 1 or offsets[-1] != rows:
        wrong = f"{len(offsets)} of {requests} requests, up to row {offsets[-1]} of {rows}"
        raise fault("offsets", wrong, "one a request, and all rows behind them")
    if offsets[decode_requests] != decode_rows:
        wrong = f"{offsets[decode_requests]} rows of {decode_requests} decode requests"
        raise fault("offsets", wrong, f"{rows_per_decode} rows each, at the front")
    if decode_rows:
        _select_decode(
            q[:decode_rows], weights[:decode_rows], k_cache, seq_lens[:decode_requests],
            block_table[:decode_requests], k, out=out[:decode_rows], enabled=enabled,
            settled=settled, epilogue=epilogue if decode_requests == requests else None,
            workspace=workspace, on_stage=on_stage, impl=impl, nan=nan,
        )  # fmt: skip
    if decode_requests == requests:
        return
    if row_ends is None:
        raise fault("row_ends", "None for prefill requests", "give what `copy_checked` wrote")
    expect("row_ends", row_ends, "[T]", (rows,), torch.int32, q.device)
    room = block_table.shape[1] * k_cache.shape[1]
    for request in range(decode_requests, requests):
        one, some = slice(request, request + 1), slice(offsets[request], offsets[request + 1])
        _select_prefill(
            q[some], weights[some], k_cache, seq_lens[one], block_table[one], k, row_ends[some],
            min(length_bounds[request], room), out=out[some], enabled=enabled,
            workspace=workspace, on_stage=on_stage, impl=impl,
            nan=None if nan is None else nan.behind(offsets[request]),
        )  # fmt: skip
    if epilogue is not None:
        epilogue.alone()


def _select_decode(
    q: Tensor, weights: Tensor, k_cache: Tensor, lengths: Tensor, block_table: Tensor, k: int,
    **options: Any,
) -> None:  # fmt: skip
    dim = check_k_cache(k_cache)
    expect("q", q, "[T, H, D]", (len(q), None, dim), q.dtype)
    requests = len(lengths)
    grouped = q.unflatten(0, (requests, len(q) // requests))
    indexer.select_paged(grouped, k_cache, weights, lengths, block_table, k, **options)


def _select_prefill(
    q: Tensor, weights: Tensor, k_cache: Tensor, length: Tensor, table: Tensor, k: int,
    row_ends: Tensor, bound: int, *, enabled: Tensor | None = None, impl: str, **options: Any,
) -> None:  # fmt: skip
    """One request: its keys are gathered, then scored."""
    keys, scales = gather(k_cache, table, length, total=bound, enabled=enabled, impl=impl)
    indexer.select_ragged(
        q, keys, scales, weights, torch.zeros_like(row_ends), row_ends, k,
        enabled=enabled, impl=impl, **options,
    )  # fmt: skip


def _check_batch(query_start: Tensor, seq_lens: Tensor, block_table: Tensor) -> torch.device:
    expect("block_table", block_table, "[R, n]", (None, None), torch.int32)
    requests, device = len(block_table), block_table.device
    expect("seq_lens", seq_lens, "[R]", (requests,), torch.int32, device)
    expect("query_start", query_start, "[R+1]", (requests + 1,), torch.int32, device)
    return device
