"""Small steps of every sort that an engine makes, as they are when nothing races."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from indexer_client import StepInputs
from ipc_handoff.layout import HandoffGeometry

REQUESTS, ROWS_EACH = 4, 4


def geometry(*, heads: int, page_size: int, top_k: int, max_context: int) -> HandoffGeometry:
    """Two layers that select, and a bank whose slots come round every second step."""
    return HandoffGeometry(
        layers=(0, 4),
        heads=heads,
        head_dim=128,
        top_k=top_k,
        page_size=page_size,
        max_rows=REQUESTS * ROWS_EACH,
        max_requests=REQUESTS,
        max_context=max_context,
        slots=2,
    )


def pages(of: HandoffGeometry) -> int:
    """Of a K cache in which every request has its own."""
    return of.max_requests * of.table_width


@dataclass(frozen=True)
class Sort:
    """What a batch is made of.

    Attributes:
        decodes, prefills: requests.
        next_n: rows of a decode request.
        padded: decode requests at the end that are none: length 0, nothing is written.
        exact: the CPU knows lengths and offsets; otherwise only a bound of the lengths.
        tight: the bound is the longest length, not the longest context.
    """

    decodes: int = 3
    prefills: int = 0
    next_n: int = 1
    padded: int = 0
    exact: bool = True
    tight: bool = False


def make(of: HandoffGeometry, sort: Sort, generator: torch.Generator) -> StepInputs:
    """The inputs of one step; lengths, pages and tokens are drawn."""
    requests = sort.decodes + sort.padded + sort.prefills
    each = [sort.next_n] * (sort.decodes + sort.padded)
    each += _drawn(sort.prefills, 1, ROWS_EACH, generator)
    # Less than fits: the step behind has one token more.
    lengths = _drawn(requests, 2 * ROWS_EACH, of.max_context - ROWS_EACH, generator)
    for request in range(sort.decodes, sort.decodes + sort.padded):
        lengths[request] = 0
    offsets = [0, *accumulate(each)]
    table = torch.randperm(pages(of), generator=generator).to(torch.int32)
    table = table[: requests * of.table_width].view(requests, -1)
    positions, slots = places(each, lengths, table, of.page_size)
    return StepInputs(
        query_start=torch.tensor(offsets, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        rows=offsets[-1],
        decode_requests=sort.decodes + sort.padded,
        rows_per_decode=sort.next_n if sort.decodes else 0,
        max_length=max(lengths) if sort.tight else of.max_context,
        exact_seq_lens=lengths if sort.exact else None,
        exact_query_start=offsets if sort.exact else None,
        positions=positions,
        slots=slots,
        request_ids=[f"request-{number}" for number in range(requests)],
    )


def places(
    each: Sequence[int], lengths: Sequence[int], table: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Positions and slots, int64 [rows], of requests of so many rows and such lengths."""
    positions, slots = [], []
    for request, (rows, length) in enumerate(zip(each, lengths, strict=True)):
        for position in range(length - rows, length):
            positions.append(max(position, 0))
            page = int(table[request, max(position, 0) // page_size])
            slots.append(page * page_size + position % page_size if length else -1)
    return torch.tensor(positions), torch.tensor(slots)


def _drawn(count: int, least: int, most: int, generator: torch.Generator) -> list[int]:
    numbers: list[int] = torch.randint(least, most + 1, (count,), generator=generator).tolist()
    return numbers
