"""What a step works on, as the engine hands it over."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.layout import HandoffGeometry

MAX_ROWS_PER_DECODE = 8


@dataclass(frozen=True)
class StepInputs:
    """One forward's requests; decode requests first.

    Attributes:
        query_start: int32 [R + 1], first row of each request, then the number of rows.
        seq_lens: int32 [R], tokens of each request after its last row of this step: row j of
            a request's n rows sees seq_lens - n + 1 + j tokens.
        block_table: int32 [R, n], pages of each request.
        rows: query tokens, the last value of query_start as the CPU knows it.
        decode_requests: the first so many requests have `rows_per_decode` rows each.
        rows_per_decode: next_n, 1 to 8; 0 if there are no decode requests.
        max_length: upper bound of seq_lens that needs no device value.
        exact_seq_lens: seq_lens as the CPU knows them, where it does.
        exact_query_start: query_start as the CPU knows it. On a GPU always: nobody reads it from
            there.
        positions: int64 [T], of each row's token in its request, T at least `rows`; slots:
            int64 [T], where its key is written, in the K caches' pages, below 0: nowhere. Looked at
            by a detector, and sent to nobody.
        request_ids: what the engine calls each request, for traces and findings.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    rows: int
    decode_requests: int
    rows_per_decode: int
    max_length: int
    exact_seq_lens: Sequence[int] | None = None
    exact_query_start: Sequence[int] | None = None
    positions: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    request_ids: Sequence[str] | None = None

    @property
    def requests(self) -> int:
        return self.seq_lens.shape[0]  # many times a step: `len` takes ten times as long

    def plan(self, step: int, epoch: int, layers: Sequence[int]) -> pb.StepPlan:
        """The plan of a step with these inputs."""
        plan = pb.StepPlan(
            step=step,
            epoch=epoch,
            rows=self.rows,
            requests=self.requests,
            decode_requests=self.decode_requests,
            rows_per_decode=self.rows_per_decode,
            layers=layers,
            max_length=self.max_length,
        )
        if self.exact_seq_lens is not None:
            plan.exact.seq_lens.extend(self.exact_seq_lens)
        if self.exact_query_start is not None:
            plan.exact.query_start.extend(self.exact_query_start)
        return plan

    def check(self, geometry: HandoffGeometry) -> None:
        """Raise ValueError, naming the field, unless the step fits into the banks."""
        width = self.block_table.shape[-1]
        for name, value, limit in (
            ("rows", self.rows, geometry.max_rows),
            ("requests", self.requests, geometry.max_requests),
            ("block_table", width, geometry.table_width),
        ):
            if not 1 <= value <= limit:
                raise ValueError(f"{name}: {value}, agreed at most {limit} (fix: a smaller step)")
        self._check_tensors(width)
        self._check_detected()
        self._check_rows()
        self._check_offsets()
        self._check_lengths(geometry)

    def _check_tensors(self, width: int) -> None:
        for name, tensor, shape in (
            ("query_start", self.query_start, (self.requests + 1,)),
            ("seq_lens", self.seq_lens, (self.requests,)),
            ("block_table", self.block_table, (self.requests, width)),
        ):
            if tensor.dtype != torch.int32 or tensor.shape != shape:
                raise ValueError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} (fix: int32 {list(shape)})"
                )

    def _check_detected(self) -> None:
        """What only detectors look at."""
        for name, tensor in (("positions", self.positions), ("slots", self.slots)):
            if tensor is not None and (
                tensor.dtype != torch.int64 or tensor.dim() != 1 or len(tensor) < self.rows
            ):
                raise ValueError(
                    f"{name}: {tensor.dtype} {[*tensor.shape]} (fix: int64 [{self.rows}] or more)"
                )
        if self.request_ids is not None and len(self.request_ids) != self.requests:
            raise ValueError(
                f"request_ids: {len(self.request_ids)} for {self.requests} requests (fix: one a "
                "request, or None)"
            )

    def _check_rows(self) -> None:
        if not 0 <= self.decode_requests <= self.requests:
            raise ValueError(
                f"decode_requests: {self.decode_requests} (fix: 0 to the step's {self.requests} "
                "requests)"
            )
        least = 1 if self.decode_requests else 0
        if not least <= self.rows_per_decode <= MAX_ROWS_PER_DECODE:
            raise ValueError(
                f"rows_per_decode: {self.rows_per_decode} (fix: {least} to {MAX_ROWS_PER_DECODE})"
            )
        prefills = self.requests - self.decode_requests
        prefill_rows = self.rows - self.decode_requests * self.rows_per_decode
        if prefill_rows < prefills or (prefill_rows and not prefills):
            raise ValueError(
                f"rows: {self.rows}, of which {prefill_rows} are left for {prefills} prefill "
                "requests (fix: decode_requests * rows_per_decode rows, and one or more a prefill "
                "request)"
            )

    def _check_offsets(self) -> None:
        exact = self.exact_query_start
        if exact is None:
            return
        if len(exact) != self.requests + 1:
            raise ValueError(
                f"exact_query_start: {len(exact)} values for {self.requests} requests (fix: one a "
                "request, then the number of rows)"
            )
        # In one comparison: a decode step has nothing else, and none may be slow.
        decodes = [i * self.rows_per_decode for i in range(self.decode_requests + 1)]
        begins_right = list(exact[: len(decodes)]) == decodes
        prefills = exact[self.decode_requests :]
        ascends = all(after > before for before, after in pairwise(prefills))
        if not (begins_right and ascends and exact[-1] == self.rows):
            raise ValueError(
                f"exact_query_start: {list(exact)} (fix: {self.decode_requests} times "
                f"{self.rows_per_decode} rows, one or more a prefill request, {self.rows} in all)"
            )

    def _check_lengths(self, geometry: HandoffGeometry) -> None:
        if not 1 <= self.max_length <= geometry.max_context:
            raise ValueError(
                f"max_length: {self.max_length} (fix: a bound of 1 to the agreed max_context "
                f"{geometry.max_context})"
            )
        exact = self.exact_seq_lens
        if exact is None:
            return
        if len(exact) != self.requests:
            raise ValueError(
                f"exact_seq_lens: {len(exact)} values for {self.requests} requests (fix: one a "
                "request, or None)"
            )
        if not 0 <= min(exact) <= max(exact) <= self.max_length:
            raise ValueError(
                f"exact_seq_lens: {min(exact)} to {max(exact)} (fix: 0 to max_length "
                f"{self.max_length})"
            )


class Fallback(Protocol):
    """Computes one layer inside the worker when no service does.

    Writes the selection, int32 [rows, top_k], into `out`. If it has an attribute
    `configuration` with a `hash`, only a service with the same hash is attached to, so that
    both select the same bits.
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        weights: torch.Tensor,
        inputs: StepInputs,
        out: torch.Tensor,
    ) -> None: ...
