"""Sparse MLA beside vLLM's kernels: checked first, then timed in one run.

    python benchmarks/sparse_mla.py                      on a CUDA machine: measure, write results
    python benchmarks/sparse_mla.py --document FILE      results -> table in docs/performance.md
    python benchmarks/sparse_mla.py --variants           what sparse_mla_variants.py asks, instead

Times are medians of CUDA-graph replays, each of several calls whose slots differ, random over a
cache many times larger than the L2 cache. The implementations take turns. "Byte floor" is the time
in which the gathered tokens could be read at the rate at which this card copies memory.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from documents import PERFORMANCE, markdown_table, origin, put, read
from results_file import RESULTS, by_key, card, write
from sparse_mla_peers import BF16, FP8, Call
from sparse_mla_variants import QUESTIONS, Question, prepared
from timing import captured, copy_rate, in_turns
from torch import Tensor

from attention_worker.kernels import sparse_mla
from attention_worker.kernels.sparse_mla.layout import decode_tokens

K, PAGE, SCALE = 2048, 64, 576**-0.5
SHAPES = {
    "bf16": [
        (8, 64), (16, 1), (16, 8), (16, 64), (16, 512), (32, 64), (64, 1), (64, 8), (64, 64),
        (64, 512), (64, 4096), (128, 64), (128, 512),
    ],
    "fp8_ds_mla": [
        (16, 1), (16, 8), (16, 64), (16, 512), (64, 1), (64, 8), (64, 64), (64, 512),
    ],
}  # fmt: skip
"""Heads and tokens."""

CONTEXT = {"decode": 1 << 20, "prefill": 1 << 17}
"""Cached tokens that slots are drawn from: many requests for decode, a long one for prefill."""

TOLERANCE = 4e-3
CALLS = 32
MARK = "sparse_mla"


def bf16_cache(tokens: int) -> Tensor:
    values = torch.randn((tokens, 576), device="cuda", dtype=torch.bfloat16)
    return values.view(-1, PAGE, 576)


def fp8_cache(tokens: int) -> Tensor:
    codes = torch.randint(0, 256, (tokens, 512), device="cuda", dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
    scales = torch.rand((tokens, 4), device="cuda") * 0.01 + 1e-4
    rope = torch.randn((tokens, 64), device="cuda", dtype=torch.bfloat16)
    parts = [codes, scales.view(torch.uint8), rope.view(torch.uint8)]
    return torch.cat(parts, 1).view(-1, PAGE, 656)


def exact(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """float64, for a few tokens."""
    flat = cache.view(-1, cache.shape[2])
    rows = []
    for query, chosen in zip(q.double(), slots.long(), strict=True):
        kv = decode_tokens(flat[chosen]).double()
        rows.append((query @ kv.T * SCALE).softmax(-1) @ kv[:, :512])
    return torch.stack(rows)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


CACHES = {"bf16": bf16_cache, "fp8_ds_mla": fp8_cache}


def drawn(tokens: int, context: int) -> list[Tensor]:
    """Slots [tokens, K] of each of several calls."""
    calls = max(2, min(CALLS, 256 // tokens))
    return [
        torch.randint(0, context, (tokens, K), device="cuda", dtype=torch.int32)
        for _ in range(calls)
    ]


def measure(form: str, heads: int, tokens: int, cache: Tensor, rate: float) -> dict[str, Any]:
    context = CONTEXT["decode" if tokens < 512 else "prefill"]
    q = torch.randn((tokens, heads, 576), device="cuda", dtype=torch.bfloat16)
    slots = drawn(tokens, context)
    calls = len(slots)
    out = torch.empty((tokens, heads, 512), device="cuda", dtype=torch.bfloat16)

    def ours(invariant: bool) -> Call:
        return lambda i: sparse_mla.attend(  # type: ignore[return-value]
            q, cache, slots[i], SCALE, out=out, batch_invariant=invariant
        )

    candidates: dict[str, Call] = {"ours": ours(False), "ours, batch-invariant": ours(True)}
    absent: dict[str, str] = {}
    for name, peer in (FP8 if cache.dtype == torch.uint8 else BF16).items():
        try:
            candidates[name] = peer(q, cache, slots, SCALE)
        except ImportError as error:
            absent[name] = str(error)

    few = slice(0, 4)
    expected = exact(q[few], cache, slots[0][few])
    row: dict[str, Any] = {"form": form, "heads": heads, "tokens": tokens, "context": context}
    row |= {"µs": {}, "error": {}, "absent": absent}
    replays = {}
    for name, call in candidates.items():
        try:
            row["error"][name] = relative_error(call(0)[few], expected)
            replays[name] = captured(call, calls)
        except Exception as error:  # a peer may not support a shape
            if name.startswith("ours"):
                raise
            absent[name] = str(error)[-200:]
    for name, error in row["error"].items():
        if name.startswith("ours") and not error <= TOLERANCE:
            raise SystemExit(f"{form}, {heads} heads, {tokens} tokens: {name} is off by {error}")
    times = in_turns(replays)
    row["µs"] = {name: taken.median for name, taken in times.items()}
    width = cache.shape[2] * cache.element_size()
    row["byte floor µs"] = tokens * K * width / rate * 1e6
    row["TFLOP/s"] = 2 * tokens * heads * K * (576 + 512) / row["µs"]["ours"] / 1e6
    return row


def compare(question: Question, heads: int, tokens: int, cache: Tensor) -> dict[str, Any]:
    """A question's variants for one shape, each checked first; µs a call and errors."""
    q = torch.randn((tokens, heads, 576), device="cuda", dtype=torch.bfloat16)
    out = torch.empty((tokens, heads, 512), device="cuda", dtype=torch.bfloat16)
    few = slice(0, 4)
    row: dict[str, Any] = {"heads": heads, "tokens": tokens, "error": {}}
    replays = {}
    for name, variant in question.variants.items():
        slots = drawn(tokens, variant.context or CONTEXT["decode"])

        def call(
            i: int, slots: list[Tensor] = slots, arguments: dict[str, Any] = variant.arguments
        ) -> Tensor:
            return sparse_mla.attend(q, cache, slots[i], SCALE, out=out, **arguments)

        with prepared(variant):
            error = relative_error(call(0)[few], exact(q[few], cache, slots[0][few]))
            if not error <= TOLERANCE:
                raise SystemExit(f"{name}, {heads} heads, {tokens} tokens: off by {error}")
            row["error"][name] = error
            replays[name] = captured(call, len(slots))
    row["µs"] = {name: taken.median for name, taken in in_turns(replays).items()}
    print(heads, tokens, {name: round(time, 2) for name, time in row["µs"].items()}, flush=True)
    return row


def variants() -> dict[str, list[dict[str, Any]]]:
    """Every question's rows."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for asked, question in QUESTIONS.items():
        print(asked, flush=True)
        cache = CACHES[question.cache](CONTEXT["decode"])
        rows[asked] = [compare(question, *shape, cache) for shape in question.shapes]
        del cache
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    peers = [*BF16, *FP8]
    head = (
        "cache", "heads", "tokens", "ours µs", "TFLOP/s", "byte floor", "batch-invariant", *peers,
        "ours / best peer",
    )  # fmt: skip
    lines = []
    for row in rows:
        times = row["µs"]
        best = min((times[peer] for peer in peers if peer in times), default=None)
        lines.append([
            row["form"], row["heads"], row["tokens"], f"**{times['ours']:.1f}**",
            f"{row['TFLOP/s']:.0f}", f"{row['byte floor µs']:.1f}",
            f"{times['ours, batch-invariant']:.1f} "
            f"({times['ours, batch-invariant'] / times['ours']:.2f}×)",
            *(f"{times[peer]:.1f}" if peer in times else "" for peer in peers),
            f"{times['ours'] / best:.2f}" if best else "",
        ])  # fmt: skip
    return markdown_table(head, lines)


def document(path: Path) -> None:
    """Put the results' table into docs/performance.md, between its marks."""
    record = read(path)
    results = record["results"]
    rate = f"k = {K}; copies run at {results['copy B/s'] / 1e12:.2f} TB/s. Times in µs."
    put(PERFORMANCE, MARK, f"{origin(record, path)} {rate}\n\n{table(results['rows'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--document", type=Path, help="a results file to put into the docs")
    parser.add_argument("--variants", action="store_true", help="time variants, not peers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument(
        "--only", choices=list(SHAPES), help="one form; the other stays in the file"
    )
    chosen = parser.parse_args()
    if chosen.document:
        document(chosen.document.resolve())
        return
    if not torch.cuda.is_available():
        sys.exit("a CUDA device is needed")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    packages = ("torch", "triton", "vllm")
    if chosen.variants:
        suffix = "-sparse_mla_variants"
        path = write(
            card(name), name, variants(), packages=packages, suffix=suffix, folder=chosen.results
        )
        print("written:", path)
        return
    rate = copy_rate()
    rows = []
    for form, make in CACHES.items():
        if chosen.only not in (None, form):
            continue
        cache = make(max(CONTEXT.values()))
        for heads, tokens in SHAPES[form]:
            rows.append(measure(form, heads, tokens, cache, rate))
            times = {name: round(time, 2) for name, time in rows[-1]["µs"].items()}
            print(form, heads, tokens, times, rows[-1]["absent"], flush=True)
        del cache
    print(table(rows))
    results = {"copy B/s": rate, "rows": rows}
    path = write(
        card(name), name, results, packages=packages, suffix="-sparse_mla", folder=chosen.results,
        combine=by_key("rows", "form", "heads", "tokens"),
    )  # fmt: skip
    print("written:", path)


if __name__ == "__main__":
    main()
