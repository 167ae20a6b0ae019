"""Steps of random data on a GPU, with selections that were computed apart from the worker."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_worker.inline_kernels import InlineKernels
from attention_worker.step_shape import StepShape
from indexer_client import StepInputs
from indexer_service.kernels import k_cache
from ipc_handoff.layout import HandoffGeometry
from tests.kernels import inputs as random_inputs

GEOMETRY = HandoffGeometry(
    layers=(1, 4, 6, 9), heads=64, head_dim=128, top_k=512, page_size=64, max_rows=96,
    max_requests=16, max_context=4096, slots=2,
)  # fmt: skip
SPARE_PAGES = 8


def pages_of(geometry: HandoffGeometry) -> int:
    """Of each K cache."""
    return geometry.table_width * geometry.max_requests + SPARE_PAGES


@dataclass(frozen=True)
class GpuCase:
    """A step on the device; q, weights, expected and keys by layer.

    keys: bf16 [requests, D], of each request's last token; slots: int64 [requests], theirs.
    """

    inputs: StepInputs
    q: Mapping[int, Tensor]
    weights: Mapping[int, Tensor]
    expected: Mapping[int, Tensor]
    keys: Mapping[int, Tensor]
    slots: Tensor


class GpuSteps:
    """Steps of one geometry. Expected selections are computed inline, apart from the worker.

    Args:
        inserts: each step's keys are inserted before its selections are expected.
        seed: of the K caches.
        whole: uint8, in which they lie, from its first byte on; by default no larger than they are.
    """

    def __init__(
        self,
        device: torch.device,
        geometry: HandoffGeometry = GEOMETRY,
        *,
        inserts: bool = False,
        seed: int = 1,
        whole: Tensor | None = None,
    ) -> None:
        self.geometry, self.device = geometry, device
        self._inserts = inserts
        source = torch.Generator().manual_seed(seed)
        self.pages = pages_of(geometry)
        one = random_inputs.k_cache(source, self.pages, geometry.page_size, geometry.head_dim)
        # As vLLM's: pages of all layers side by side.
        shape = (self.pages, len(geometry.layers), *one.shape[1:])
        if whole is None:
            whole = torch.empty(math.prod(shape), dtype=torch.uint8, device=device)
        self.room = whole[: math.prod(shape)].view(shape)
        for ordinal in range(len(geometry.layers)):
            self.room[:, ordinal] = one[torch.randperm(self.pages, generator=source)].to(device)
        self.k_caches = {layer: self.room[:, i] for i, layer in enumerate(geometry.layers)}
        self._expected = InlineKernels(geometry, self.k_caches, device)

    def case(
        self, number: int, requests: int, *, next_n: int = 1, prefill: tuple[int, ...] = ()
    ) -> GpuCase:
        """The n-th step: so many decode requests, then one of so many rows for each prefill."""
        geometry = self.geometry
        source = torch.Generator().manual_seed(number)
        rows_of = [next_n] * requests + list(prefill)
        longest = geometry.max_context

        def length(rows: int) -> int:
            return int(torch.randint(rows, longest + 1, (), generator=source))

        lengths = [length(rows) for rows in rows_of]
        offsets = torch.tensor([0, *rows_of], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        table = torch.randperm(self.pages, generator=source)[: len(rows_of) * geometry.table_width]
        rows = int(offsets[-1])
        inputs = StepInputs(
            query_start=offsets.to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=table.view(len(rows_of), -1).to(torch.int32).to(self.device),
            rows=rows,
            decode_requests=requests,
            rows_per_decode=next_n if requests else 0,
            max_length=max(lengths),
            exact_seq_lens=lengths if number % 2 else None,
            exact_query_start=offsets.tolist(),
        )
        q, weights, expected, keys = {}, {}, {}, {}
        slots = self._last_slots(inputs, lengths)
        self._expected.take(inputs, number)
        for layer in geometry.layers:
            key = torch.randn((len(lengths), geometry.head_dim), generator=source)
            keys[layer] = key.to(torch.bfloat16).to(self.device)
            if self._inserts:
                k_cache.insert(keys[layer], slots, self.k_caches[layer])
            codes = random_inputs.codes(source, rows, geometry.heads, geometry.head_dim)
            q[layer] = codes.to(self.device)
            w = torch.randn((rows, geometry.heads), generator=source)
            weights[layer] = w.to(self.device)
            expected[layer] = torch.full(
                (rows, geometry.top_k), -3, dtype=torch.int32, device=self.device
            )
            shape = StepShape.of(inputs)
            self._expected.select(layer, q[layer], weights[layer], shape, expected[layer])
        torch.cuda.synchronize()
        return GpuCase(inputs, q, weights, expected, keys, slots)

    def _last_slots(self, inputs: StepInputs, lengths: list[int]) -> Tensor:
        page = self.geometry.page_size
        last = torch.tensor(lengths, device=self.device) - 1
        pages = inputs.block_table.long().gather(1, (last // page).unsqueeze(1)).squeeze(1)
        return pages * page + last % page


def wrong(case: GpuCase, found: Mapping[int, Tensor]) -> list[str]:
    """One line a layer whose rows differ, or whose padding is not -1."""
    told = []
    for layer, expected in case.expected.items():
        out, rows = found[layer], len(expected)
        bad = (out[:rows] != expected).any(1).nonzero().flatten().tolist()
        if bad:
            told.append(f"layer {layer}: rows {bad}, first {out[bad[0], :4].tolist()}")
        if bool((out[rows:] != -1).any()):
            told.append(f"layer {layer}: padding")
    return told
