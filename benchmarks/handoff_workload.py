"""A model's layers on a GPU, as the hand-over's benchmark runs them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_worker.device_session import DeviceIndexer
from attention_worker.kernels.sparse_mla import attend, to_slots
from indexer_client import StepInputs
from ipc_handoff.layout import HandoffGeometry

LAYERS, HEADS, HEAD_DIM, TOP_K, PAGE = 61, 64, 128, 2048, 64
MOST_REQUESTS, LONGEST, CHUNK = 64, 65536, 4096
ATTENTION_HEADS, LATENT, WIDTH = 16, 512, 576
DIFFERENT = 6
"""K caches that layers take in turns: together many times larger than the L2 cache."""

GEOMETRY = HandoffGeometry(
    layers=tuple(range(LAYERS)), heads=HEADS, head_dim=HEAD_DIM, top_k=TOP_K, page_size=PAGE,
    max_rows=CHUNK, max_requests=MOST_REQUESTS, max_context=LONGEST, slots=2,
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Attributes:
    k_caches: by layer, uint8 [pages, page, D+4]; some layers share one.
    q: e4m3 bytes [DIFFERENT, rows, heads, D]; weights: fp32 [DIFFERENT, rows, heads].
    keys: bf16 [requests, D], of the step's tokens.
    kv_cache: bf16 [pages, page, 576], of all layers; latent, rope: of the attention's queries.
    """

    device: torch.device
    k_caches: dict[int, Tensor]
    q: Tensor
    weights: Tensor
    keys: Tensor
    kv_cache: Tensor
    latent: Tensor
    rope: Tensor

    @classmethod
    def make(cls, device: torch.device) -> "Work":
        source = torch.Generator(device=device).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source, device=device)

        pages = MOST_REQUESTS * LONGEST // PAGE
        caches = [_k_cache(pages, normal, source, device) for _ in range(DIFFERENT)]
        return cls(
            device=device,
            k_caches={layer: caches[layer % DIFFERENT] for layer in GEOMETRY.layers},
            q=normal(DIFFERENT, CHUNK, HEADS, HEAD_DIM).to(torch.float8_e4m3fn).view(torch.uint8),
            weights=normal(DIFFERENT, CHUNK, HEADS) / HEADS,
            keys=normal(MOST_REQUESTS, HEAD_DIM).to(torch.bfloat16),
            kv_cache=normal(pages, PAGE, WIDTH).to(torch.bfloat16),
            latent=normal(MOST_REQUESTS, ATTENTION_HEADS, LATENT).to(torch.bfloat16),
            rope=normal(MOST_REQUESTS, ATTENTION_HEADS, WIDTH - LATENT).to(torch.bfloat16),
        )

    def change(self, number: int, rows: int) -> None:
        """Other queries for some layers: no step's answers are another's."""
        self.q[number % DIFFERENT, :rows].bitwise_xor_(1)


def _k_cache(
    pages: int, normal: Callable[..., Tensor], source: torch.Generator, device: torch.device
) -> Tensor:
    cache = torch.empty((pages, PAGE, HEAD_DIM + 4), dtype=torch.uint8, device=device)
    flat = cache.flatten(1)
    for first in range(0, pages, 8192):
        codes = normal(min(8192, pages - first), PAGE * HEAD_DIM).to(torch.float8_e4m3fn)
        flat[first : first + 8192, : PAGE * HEAD_DIM] = codes.view(torch.uint8)
    flat[:, PAGE * HEAD_DIM :].view(torch.float32).uniform_(0.5, 1.5, generator=source)
    return cache


class Decode:
    """Decode steps of one size, captured as a FULL graph of all layers.

    Args:
        with_attention: insert keys before, convert and attend after each selection.
    """

    def __init__(
        self, work: Work, indexer: DeviceIndexer, requests: int, context: int, with_attention: bool
    ) -> None:
        self.work, self.indexer = work, indexer
        self.requests, self.context = requests, context
        self.with_attention = with_attention
        device = work.device
        source = torch.Generator().manual_seed(requests + context)
        self._lengths = torch.randint(context - 60, context + 1, (requests,), generator=source)
        columns = context // PAGE
        table = torch.randperm(len(work.kv_cache), generator=source)[: requests * columns]
        self.inputs = StepInputs(
            query_start=torch.arange(requests + 1, dtype=torch.int32, device=device),
            seq_lens=self._lengths.to(torch.int32).to(device),
            block_table=table.view(requests, columns).to(torch.int32).to(device),
            rows=requests,
            decode_requests=requests,
            rows_per_decode=1,
            max_length=context,
            exact_query_start=list(range(requests + 1)),
        )
        last = self._lengths - 1
        pages = table.view(requests, columns).gather(1, (last // PAGE).unsqueeze(1)).squeeze(1)
        self._slots = (pages * PAGE + last % PAGE).to(device)
        self.out = torch.full((LAYERS, requests, TOP_K), -7, dtype=torch.int32, device=device)
        indexer.begin_inline(requests, 1)
        self._forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads of the process make banks meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._forward()

    def _forward(self) -> None:
        work, rows = self.work, self.requests
        for layer in GEOMETRY.layers:
            if self.with_attention:
                self.indexer.insert(work.keys[:rows], self._slots, layer)
            own = layer % DIFFERENT
            self.indexer.select(
                layer, work.q[own, :rows], work.weights[own, :rows], self.out[layer]
            )
            if self.with_attention:
                requests = self.inputs.query_start[:rows]
                slots = to_slots(self.out[layer], requests, self.inputs.block_table, PAGE)
                attend((work.latent[:rows], work.rope[:rows]), work.kv_cache, slots, 0.1)

    def begin(self) -> int:
        """`begin_step`; the step's number."""
        return self.indexer.begin_step(self.inputs)

    def replay(self) -> float:
        """GPU time of the forward, µs."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def chunk_inputs(work: Work, rows: int = CHUNK, context: int = LONGEST) -> StepInputs:
    """One prefill request whose last `rows` tokens are new."""
    columns = context // PAGE
    table = torch.randperm(len(work.kv_cache), generator=torch.Generator().manual_seed(3))
    return StepInputs(
        query_start=torch.tensor([0, rows], dtype=torch.int32, device=work.device),
        seq_lens=torch.tensor([context], dtype=torch.int32, device=work.device),
        block_table=table[:columns].view(1, -1).to(torch.int32).to(work.device),
        rows=rows,
        decode_requests=0,
        rows_per_decode=0,
        max_length=context,
        exact_seq_lens=[context],
        exact_query_start=[0, rows],
    )
