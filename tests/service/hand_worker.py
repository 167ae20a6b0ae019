"""A worker of a service on a GPU, by hand: it publishes and stages with the worker's own kernels.

Every step has other data. Without a GPU all of it runs in Triton's interpreter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.kernels.checked_inputs import checked_copy
from indexer_service.kernels.step import select_step
from ipc_handoff.control import ServiceControl, WorkerControl
from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.kernels.publish import publish
from ipc_handoff.kernels.stage import stage
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from tests.kernels import inputs

EPOCH = 77
UNWRITTEN = -9
"""What answers hold before anybody writes them."""


@dataclass
class HandStep:
    """One step of the worker.

    staged_*: what is published, which a test may spoil; q, weights: of each layer.
    """

    plan: pb.StepPlan
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    q: list[Tensor]
    weights: list[Tensor]
    exact: dict[str, list[int] | None] = field(default_factory=dict)


class HandWorker:
    """Args:
    device: with a GPU, `bank` gives the addresses; without one, the bank lies here.
    pages: of each K cache.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        device: torch.device,
        *,
        addresses: tuple[int, int] | None = None,
        pages: int = 40,
    ) -> None:
        self.geometry, self.device = geometry, device
        self.source = torch.Generator().manual_seed(5)
        layout = geometry.device
        if addresses is None:
            self._rooms = [
                torch.zeros(size + DEVICE_LINE, dtype=torch.uint8)
                for size in (layout.staging_size, layout.answers_size)
            ]
            starts = [-(-room.data_ptr() // DEVICE_LINE) * DEVICE_LINE for room in self._rooms]
            addresses = (starts[0], starts[1])
        self.staging, self.answers = addresses
        self._block = memoryview(bytearray(geometry.control.size))
        self.control = WorkerControl(self._block, geometry)
        self.control.start(EPOCH)
        self.k_caches = {
            layer: inputs.k_cache(self.source, pages, geometry.page_size, geometry.head_dim).to(
                device
            )
            for layer in geometry.layers
        }
        self.memory = WorkerMemory(geometry, device)
        self.steps = 0

    def service_control(self) -> ServiceControl:
        return ServiceControl(self._block, self.geometry, EPOCH)

    def make(
        self,
        rows_of: Sequence[int],
        lengths: Sequence[int],
        *,
        decode: int | None = None,
        exact_lengths: bool = True,
        **plan: object,
    ) -> HandStep:
        """The next step: requests of so many rows and lengths; all of them decode by default."""
        self.steps += 1
        g = self.geometry
        decode = len(rows_of) if decode is None else decode
        offsets = [0, *accumulate(rows_of)]
        columns = g.table_width
        pages = len(next(iter(self.k_caches.values())))
        table = torch.randint(0, pages, (len(rows_of), columns), generator=self.source)
        fields = {
            "step": self.steps,
            "epoch": EPOCH,
            "rows": offsets[-1],
            "requests": len(rows_of),
            "decode_requests": decode,
            "rows_per_decode": rows_of[0] if decode else 0,
            "layers": g.layers,
            "max_length": max(*lengths, 1),
            "exact": pb.ExactValues(
                query_start=offsets, seq_lens=lengths if exact_lengths else None
            ),
        }
        rows = offsets[-1]
        q = inputs.codes(self.source, len(g.layers), rows, g.heads, g.head_dim)
        weights = torch.randn((len(g.layers), rows, g.heads), generator=self.source)
        return HandStep(
            plan=pb.StepPlan(**(fields | plan)),
            query_start=torch.tensor(offsets, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=table.to(torch.int32).to(self.device),
            q=list(q.to(self.device)),
            weights=list(weights.to(self.device)),
        )

    def publish(self, step: HandStep) -> None:
        publish(
            self.memory, step.query_start, step.seq_lens, step.block_table, step=step.plan.step,
            attachment=1, staging=self.staging, answers=self.answers, rows=step.plan.rows,
            max_length=step.plan.max_length,
        )  # fmt: skip

    def stage(self, step: HandStep, ordinal: int) -> None:
        stage(
            self.memory, step.q[ordinal].flatten(1), step.weights[ordinal], ordinal=ordinal,
            first=ordinal == 0,
        )  # fmt: skip

    def expected(self, step: HandStep, ordinal: int, impl: str) -> Tensor:
        """What the layer's answer must be: int32 [rows, top_k]."""
        g, plan = self.geometry, step.plan
        checked = checked_copy(
            step.query_start, step.seq_lens, step.block_table, rows=plan.rows,
            decode_requests=plan.decode_requests, rows_per_decode=plan.rows_per_decode,
            pages=min(len(cache) for cache in self.k_caches.values()), page_size=g.page_size,
            max_length=plan.max_length, exact_seq_lens=plan.exact.seq_lens or None,
            exact_query_start=plan.exact.query_start,
        )  # fmt: skip
        out = torch.full((plan.rows, g.top_k), UNWRITTEN, dtype=torch.int32, device=self.device)
        select_step(
            step.q[ordinal], step.weights[ordinal], self.k_caches[g.layers[ordinal]],
            checked.query_start, checked.seq_lens, checked.block_table, g.top_k,
            decode_requests=plan.decode_requests, rows_per_decode=plan.rows_per_decode,
            max_length=plan.max_length, skip_requests=checked.skip_requests, out=out, impl=impl,
        )  # fmt: skip
        return out
