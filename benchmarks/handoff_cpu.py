"""What the hand-over costs on a CPU, and the CPU engine beside plain torch calls.

    make bench-cpu        (or: python benchmarks/handoff_cpu.py [--steps N])

One decode row over a short context, so that the hand-over shows beside the selection. Ring,
stream and unary calls take turns, and so does the same selection computed in this process;
every answer is compared with it. The service is a process of its own.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import torch
import typer
from results_file import processor, write
from rich.console import Console
from rich.table import Table

from attention_worker.fallback import InlineSelector
from dsa_indexer_cli.demo.service_process import ServiceProcess
from indexer_client import ClientSettings, Session, Source, StepInputs
from indexer_service.kernels import k_cache, mqa_logits, topk
from ipc_handoff.addresses import UNIX
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor

HEADS, HEAD_DIM, PAGE, TOP_K, CONTEXT = 16, 128, 64, 64, 256
LAYERS = (1, 8)
WARM_UP_STEPS = 20

Select = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Workload:
    """One decode row, its query drawn anew every step."""

    def __init__(self, layers: int) -> None:
        pages = CONTEXT // PAGE
        self.geometry = HandoffGeometry(
            layers=tuple(range(layers)),
            heads=HEADS,
            head_dim=HEAD_DIM,
            top_k=TOP_K,
            page_size=PAGE,
            max_rows=8,
            max_requests=8,
            max_context=CONTEXT,
        )
        self.k_caches = {}
        for layer in range(layers):
            cache = SharedTensor.allocate((pages, PAGE, HEAD_DIM + 4), torch.uint8, f"k{layer}")
            keys = torch.randn(CONTEXT, HEAD_DIM, dtype=torch.bfloat16)
            k_cache.insert(keys, torch.arange(CONTEXT), cache.tensor)
            self.k_caches[layer] = cache
        tensors = {layer: cache.tensor for layer, cache in self.k_caches.items()}
        self.inline = InlineSelector(tensors, TOP_K)
        self.inputs = StepInputs(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([CONTEXT], dtype=torch.int32),
            block_table=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
            rows=1,
            decode_requests=1,
            rows_per_decode=1,
            max_length=CONTEXT,
            exact_seq_lens=[CONTEXT],
        )

    def query(self) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(1, HEADS, HEAD_DIM).to(torch.float8_e4m3fn)
        return q, torch.randn(1, HEADS)


def measure(address: str, layers: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of every step, by way."""
    work = Workload(layers)
    sessions = {
        way: Session(
            work.geometry,
            work.k_caches,
            work.inline,
            settings=ClientSettings(
                address=address, signalling="stream" if way == "stream" else "ring"
            ),
        )
        for way in ("ring", "stream", "unary")
    }
    out, expected = (torch.empty(1, TOP_K, dtype=torch.int32) for _ in range(2))
    times: dict[str, list[float]] = {way: [] for way in ("inline", *sessions)}

    def step(way: str) -> float:
        queries = [work.query() for _ in range(layers)]
        began = time.perf_counter_ns()
        if way == "inline":
            for layer, (q, weights) in enumerate(queries):
                work.inline(layer, q, weights, work.inputs, out)
        elif way == "unary":
            for layer, (q, weights) in enumerate(queries):
                sessions[way].select_once(layer, q, weights, work.inputs, out=out)
        else:
            with sessions[way].step(work.inputs) as current:
                for layer, (q, weights) in enumerate(queries):
                    if current.select(layer, q, weights, out=out) is not Source.SERVICE:
                        raise RuntimeError(f"{way}: the service did not answer")
        took = (time.perf_counter_ns() - began) / 1000
        work.inline(layers - 1, *queries[-1], work.inputs, expected)
        if not torch.equal(out, expected):
            raise RuntimeError(f"{way}: a wrong answer")
        return took

    try:
        for session in sessions.values():
            session.start()
            session.wait_attached(10)
        for turn in range(WARM_UP_STEPS + steps):
            for way, taken in times.items():
                took = step(way)
                if turn >= WARM_UP_STEPS:
                    taken.append(took)
    finally:
        for session in sessions.values():
            session.close()
    return times


def plain_torch_logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float32 scores without scales: what a few torch calls cost for the same work."""
    products = torch.einsum("bhd,bnd->bhn", q, keys).relu_()
    return torch.einsum("bhn,bh->bn", products, weights)


def engine_times() -> dict[str, float]:
    """Milliseconds, median of some runs: B=8, 8192 tokens, 64 heads, k=2048."""
    batch, length, heads = 8, 8192, 64
    cache = torch.zeros(batch * length // PAGE, PAGE, HEAD_DIM + 4, dtype=torch.uint8)
    keys = torch.randn(batch * length, HEAD_DIM, dtype=torch.bfloat16)
    k_cache.insert(keys, torch.arange(batch * length), cache)
    q = torch.randn(batch, 1, heads, HEAD_DIM).to(torch.float8_e4m3fn)
    weights = torch.randn(batch, heads)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    table = torch.arange(len(cache), dtype=torch.int32).view(batch, -1)
    scores = mqa_logits.paged(q, cache, weights, lengths, table, length)
    plain_q, plain_keys = q[:, 0].float(), keys.float().view(batch, length, HEAD_DIM)
    return {
        "logits, reference": _milliseconds(
            lambda: mqa_logits.paged(q, cache, weights, lengths, table, length)
        ),
        "logits, plain torch": _milliseconds(
            lambda: plain_torch_logits(plain_q, plain_keys, weights)
        ),
        "top-k, reference": _milliseconds(lambda: topk.select(scores, 2048)),
        "top-k, torch.topk": _milliseconds(lambda: torch.topk(scores, 2048)),
    }


def _milliseconds(work: Callable[[], object], runs: int = 9) -> float:
    work()
    taken = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1000)
    return median(taken)


def main(
    steps: Annotated[int, typer.Option(min=100, help="Timed steps of each way.")] = 500,
) -> None:
    """Measure, print a table, write benchmarks/results."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as the service
    console = Console()
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        address = f"{UNIX}{Path(folder) / 'sockets' / 'indexer.sock'}"
        service = ServiceProcess(address, None, Path(folder) / "service.log")
        service.start()
        table = Table("layers", "way", "step p50 µs", "step p99 µs", "over inline a layer, p50 µs")
        try:
            for layers in LAYERS:
                times = measure(address, layers, steps)
                inline = median(times["inline"])
                for way, taken in times.items():
                    p50, p99 = median(taken), quantiles(taken, n=100)[98]
                    added = (p50 - inline) / layers
                    results[f"{way}, {layers} layers"] = {
                        "step_p50_us": round(p50, 1),
                        "step_p99_us": round(p99, 1),
                        "added_a_layer_p50_us": round(added, 1),
                    }
                    table.add_row(str(layers), way, f"{p50:.0f}", f"{p99:.0f}", f"{added:.0f}")
        finally:
            service.stop()
    engine = engine_times()
    console.print(table)
    console.print({name: f"{value:.2f} ms" for name, value in engine.items()})
    results["engine, B=8, 8192 tokens, 64 heads, k=2048 (ms)"] = {
        name: round(value, 2) for name, value in engine.items()
    }
    results["steps"] = steps
    console.print(f"written to {write('cpu-handoff', processor(), results)}")


if __name__ == "__main__":
    typer.run(main)
