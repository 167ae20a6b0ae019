"""Rows of prefilling: ragged logits, top-k of long rows, both together, and the K cache."""

from functools import partial
from typing import Any

import indexer_peers as peers
import torch
from indexer_checks import (
    TOLERANCE,
    exact_ragged,
    overlap,
    same_sets,
    sampled,
    score_error,
    selection,
)
from indexer_inputs import (
    DEVICE,
    DIM,
    KEY_BYTES,
    PAGE,
    Call,
    Pool,
    Prefill,
    normal,
    permutation,
)
from indexer_rows import FORMS, Row, need
from torch import Tensor

from indexer_service.kernels import indexer, k_cache, mqa_logits, topk

CALLS = 2
"""Milliseconds each: few are enough."""


def scores_of(heads: int, rows: int, keys: int, impl: str) -> dict[str, Any]:
    """Ragged logits alone; TFLOP/s count the pairs of row and key that are asked for."""
    inputs = Prefill(heads, rows, keys)
    row = Row({"H": heads, "rows": rows, "keys": keys}, CALLS)
    some = sampled(rows)
    exact = exact_ragged(inputs, some)
    scores = torch.empty((rows, keys), device=DEVICE)

    def logits(_: int) -> Tensor:
        return mqa_logits.ragged(*inputs.arguments(), out=scores, impl=impl)

    def right(name: str) -> None:
        error = score_error(logits(0)[some], exact)
        row.checks[f"{name}: error"] = error
        need(error <= TOLERANCE, f"scores are off by {error}")

    def right_peer(call: Call) -> None:
        seen: Tensor = call(0)[some]  # type: ignore[index]
        row.checks["DeepGEMM: error"] = score_error(
            seen.masked_fill(exact == -torch.inf, -torch.inf), exact
        )

    for name, arch in FORMS.items():
        row.ours(name, logits, scores, partial(right, name), arch)
    row.peer("DeepGEMM", lambda: peers.ragged_logits(inputs), right_peer)
    done = row.done()
    done["TFLOP/s"] = {
        name: round(inputs.operations / times[0] / 1e6, 1) for name, times in done["µs"].items()
    }
    return done


def topk_of(rows: int, keys: int, k: int, rate: float, impl: str) -> dict[str, Any]:
    """Top-k of rows that see all keys up to themselves, the scores as a model's logits lie."""
    inputs = Prefill(8, rows, keys)
    scores = normal(rows, keys) * 4
    row = Row({"rows": rows, "keys": keys, "k": k}, CALLS)
    chosen = torch.empty((rows, k), dtype=torch.int32, device=DEVICE)
    start, end = inputs.row_start, inputs.row_end
    some = sampled(rows)

    def select(_: int) -> Tensor:
        return topk.select(scores, k, start, end, out=chosen, impl=impl)

    def right() -> None:
        expected = selection(scores[some], k, end[some])
        need(same_sets(select(0)[some], expected), "not the k best")

    row.ours("ours", select, chosen, right)
    row.peer("per row", lambda: _alone(peers.per_row_prefill(start, end, k), scores))
    row.peer("torch.topk", lambda: _alone(peers.torch_topk(end, k, keys), scores))
    done = row.done()
    done["byte floor µs"] = float(end.sum(dtype=torch.float64)) * 4 / rate * 1e6
    return done


def select_of(heads: int, rows: int, keys: int, k: int, impl: str) -> dict[str, Any]:
    """`indexer.select_ragged` beside DeepGEMM's logits with vLLM's top-k."""
    inputs = Prefill(heads, rows, keys)
    row = Row({"H": heads, "rows": rows, "keys": keys, "k": k}, CALLS)
    chosen = torch.empty((rows, k), dtype=torch.int32, device=DEVICE)
    some = sampled(rows)
    expected = selection(exact_ragged(inputs, some), k)

    def select(_: int) -> Tensor:
        return indexer.select_ragged(*inputs.arguments(), k, out=chosen, impl=impl)

    def right(name: str) -> None:
        q, k_values, k_scale, weights, start, end = inputs.arguments()
        own = mqa_logits.ragged(
            q[some], k_values, k_scale, weights[some], start[some], end[some], impl=impl
        )
        seen = select(0)[some]
        need(same_sets(seen, selection(own, k)), "not the k best of its own scores")
        row.checks[f"{name}: float64's choice"] = overlap(seen, expected)

    def chain() -> Call:
        score = peers.ragged_logits(inputs)
        best = peers.per_row_prefill(inputs.row_start, inputs.row_end, k)
        return lambda call: best(score(call))

    for name, arch in FORMS.items():
        row.ours(name, select, chosen, partial(right, name), arch)
    row.peer("DeepGEMM + per row", chain)
    return row.done()


def insert_of(tokens: int, pool: Pool, rate: float, impl: str) -> dict[str, Any]:
    """`k_cache.insert`: each call writes other slots, of whole pages where there are many."""
    calls = max(2, min(32, (1 << 17) // tokens))
    keys = normal(tokens, DIM, dtype=torch.bfloat16)
    slots = _slots(calls, tokens, pool)
    row = Row({"tokens": tokens, "calls": calls}, calls)

    def right() -> None:
        other = torch.zeros_like(pool.k_cache[: 2 * PAGE])
        few = torch.arange(min(tokens, PAGE), device=DEVICE)
        expected = other.clone()
        k_cache.insert(keys, few, other, impl=impl)
        k_cache.insert(keys, few, expected, impl="reference")
        need(torch.equal(other, expected), "other bytes than the reference's")

    def insert(call: int) -> None:
        k_cache.insert(keys, slots[call], pool.k_cache, impl=impl)

    row.ours("ours", insert, pool.k_cache, right)
    row.peer("vLLM", lambda: peers.insert(keys, slots, pool.k_cache))
    done = row.done()
    done["byte floor µs"] = tokens * (2 * DIM + 8 + KEY_BYTES) / rate * 1e6
    return done


def _slots(calls: int, tokens: int, pool: Pool) -> Tensor:
    """int64 [calls, tokens]: one a request as in decoding, or page after page as in prefilling."""
    if tokens <= PAGE:
        drawn = permutation(pool.pages * PAGE)[: calls * tokens]
        return drawn.view(calls, tokens)
    pages = torch.empty((calls, tokens // PAGE), dtype=torch.int32, device=DEVICE)
    pool.fill(pages)
    places = torch.arange(PAGE, device=DEVICE)
    return (pages.to(torch.int64).unsqueeze(2) * PAGE + places).flatten(1)


def gather_of(requests: int, length: int, pool: Pool, rate: float, impl: str) -> dict[str, Any]:
    """`k_cache.gather`: the copy alone, its sizes known, and the whole call, which reads them."""
    calls = 8
    tables = torch.empty((calls, requests, length // PAGE), dtype=torch.int32, device=DEVICE)
    pool.fill(tables)
    lengths = torch.full((requests,), length, dtype=torch.int32, device=DEVICE)
    row = Row(
        {"requests": requests, "length": length, "calls": calls}, calls, lambda: pool.fill(tables)
    )

    def whole(call: int, impl: str = impl, total: int | None = None) -> tuple[Tensor, Tensor]:
        return k_cache.gather(pool.k_cache, tables[call], lengths, total=total, impl=impl)

    def right() -> None:
        pairs = zip(whole(0), whole(0, "reference"), strict=True)
        need(
            all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs),
            "other bytes than the reference's",
        )

    known = requests * length
    row.ours("ours", lambda call: whole(call, total=known), None, right)
    row.waits("ours, whole call", whole)
    row.peer("vLLM", lambda: peers.gather(pool.k_cache, tables, lengths))
    done = row.done()
    done["byte floor µs"] = requests * length * 2 * KEY_BYTES / rate * 1e6
    return done


def _alone(select: peers.TopK, scores: Tensor) -> Call:
    return lambda _: select(scores)
