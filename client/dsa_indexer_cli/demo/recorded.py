"""The recorded decode step and prefill rows, with vLLM's own selection as what is expected."""

import torch
from dsa_indexer_recordings.recording import TOP_K, Prefill, Recording

from dsa_indexer_cli.demo.cases import Case, Query, Workload
from indexer_client import StepInputs
from indexer_service.kernels import topk
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

DECODE_LAYER, PREFILL_LAYER = 0, 1
_PAGE = 64


def recorded_workload(recording: Recording) -> Workload:
    """Two steps: the two decode rows on one layer, the 19 prefill rows on another."""
    decode, prefill = recording.decode, recording.prefill
    prefill_table, prefill_cache = _paged(prefill)
    caches = {
        DECODE_LAYER: _shared(decode.k_cache, "decode"),
        PREFILL_LAYER: _shared(prefill_cache, "prefill"),
    }
    geometry = HandoffGeometry(
        layers=tuple(caches),
        heads=decode.q.shape[2],
        head_dim=decode.q.shape[3],
        top_k=TOP_K,
        page_size=_PAGE,
        max_rows=32,
        max_requests=32,
        max_context=decode.block_table.shape[1] * _PAGE,
    )
    cases = (_decode_case(recording), _prefill_case(prefill, prefill_table))
    return Workload(geometry, caches, len(cases), cases.__getitem__)


def _shared(tensor: torch.Tensor, label: str) -> SharedTensor:
    shared = SharedTensor.allocate(tuple(tensor.shape), tensor.dtype, label)
    shared.tensor.copy_(tensor)
    return shared


def _paged(prefill: Prefill) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """vLLM recorded gathered keys; put each request's into pages of its own.

    Returns:
        pages of the request that begins at key n, by n; and the K cache.
    """
    starts = sorted(set(prefill.row_start.tolist()))
    ends = [*starts[1:], len(prefill.k)]
    counts = [-(-(end - start) // _PAGE) for start, end in zip(starts, ends, strict=True)]
    cache = torch.zeros(sum(counts), _PAGE, prefill.k.shape[1] + 4, dtype=torch.uint8)
    values, scales = planes(cache)
    tables, first = {}, 0
    for start, end, count in zip(starts, ends, counts, strict=True):
        keys = torch.arange(end - start)
        page, place = first + keys // _PAGE, keys % _PAGE
        values[page, place] = prefill.k[start:end]
        scales[page, place] = prefill.k_scale[start:end].unsqueeze(1).view(torch.uint8)
        tables[start] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return tables, cache


def _decode_case(recording: Recording) -> Case:
    decode = recording.decode
    lengths = decode.seq_lens.flatten()
    inputs = StepInputs(
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32),
        seq_lens=lengths,
        block_table=decode.block_table,
        rows=len(lengths),
        decode_requests=len(lengths),
        rows_per_decode=1,
        max_length=int(lengths.max()),
        exact_seq_lens=lengths.tolist(),
    )
    query = Query(decode.q.squeeze(1), decode.weights)
    # vLLM writes a selection in any order; as a set it ascends.
    return Case(
        "recorded decode",
        inputs,
        {DECODE_LAYER: query},
        {DECODE_LAYER: ascending(recording.attention.topk_indices)},
    )


def _prefill_case(prefill: Prefill, tables: dict[int, torch.Tensor]) -> Case:
    """The rows are samples, not neighbours: each is a prefill request of one row."""
    rows = len(prefill.q)
    lengths = (prefill.row_end - prefill.row_start).to(torch.int32)
    width = max(len(table) for table in tables.values())
    block_table = torch.zeros(rows, width, dtype=torch.int32)
    for row, start in enumerate(prefill.row_start.tolist()):
        block_table[row, : len(tables[start])] = tables[start]
    inputs = StepInputs(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=lengths,
        block_table=block_table,
        rows=rows,
        decode_requests=0,
        rows_per_decode=0,
        max_length=int(lengths.max()),
        exact_seq_lens=lengths.tolist(),
    )
    # vLLM's selection of these rows was not recorded, its scores were.
    expected = topk.select(prefill.logits, TOP_K, prefill.row_start, prefill.row_end)
    scores = torch.full((rows, int(lengths.max())), -torch.inf)
    for row, (start, length) in enumerate(
        zip(prefill.row_start.tolist(), lengths.tolist(), strict=True)
    ):
        scores[row, :length] = prefill.logits[row, start : start + length]
    return Case(
        "recorded prefill",
        inputs,
        {PREFILL_LAYER: Query(prefill.q, prefill.weights)},
        {PREFILL_LAYER: expected},
        {PREFILL_LAYER: scores},
    )


def ascending(indices: torch.Tensor) -> torch.Tensor:
    """Rows of indices in ascending order with their -1 at the tail: the form of our answers."""
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(indices < 0, last, indices).sort(dim=-1).values
    return torch.where(ordered == last, -1, ordered).to(torch.int32)
