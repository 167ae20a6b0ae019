"""Rows of decoding: `indexer.select_paged` and its parts, and what a long capture costs."""

from collections.abc import Callable
from typing import Any

import indexer_peers as peers
import torch
from indexer_checks import (
    TOLERANCE,
    exact_paged,
    overlap,
    rows_of,
    same_sets,
    sampled,
    score_error,
    selection,
)
from indexer_inputs import DEVICE, KEY_BYTES, Call, Decode, Pool, normal
from indexer_rows import FORMS, RIGHT, Row, need
from torch import Tensor

from indexer_service.kernels import indexer, mqa_logits, topk

FEWEST_CALLS, MOST_CALLS = (4, 32) if DEVICE.type == "cuda" else (1, 2)
KEYS_OF_A_GRAPH = 1 << 22


def calls_for(batch: int, context: int) -> int:
    """How many layers a graph holds: a millisecond or so."""
    return max(FEWEST_CALLS, min(MOST_CALLS, KEYS_OF_A_GRAPH // (batch * context)))


def whole_and_parts(
    heads: int, batch: int, next_n: int, context: int, k: int, pool: Pool, rate: float, impl: str
) -> dict[str, Any]:
    """One of the shapes: ours in both forms, the peers' logits, top-k and both in one graph."""
    inputs = Decode(heads, batch, context, context, calls_for(batch, context), pool, next_n)
    row = Row(
        {"H": heads, "B": batch, "next_n": next_n, "context": context, "k": k},
        inputs.calls,
        inputs.refresh,
        inputs.rewind,
    )
    rows = rows_of(sampled(batch), next_n)
    exact = exact_paged(inputs, sampled(batch))
    expected = selection(exact, k)
    scores = normal(inputs.rows, context)  # until logits are written there
    chosen = torch.empty((inputs.rows, k), dtype=torch.int32, device=DEVICE)

    def logits(call: int) -> Tensor:
        return mqa_logits.paged(*inputs.arguments(call), context, out=scores, impl=impl)

    def select(call: int) -> Tensor:
        return indexer.select_paged(*inputs.arguments(call), k, out=chosen, impl=impl)

    def right_logits(name: str) -> Callable[[], None]:
        def check() -> None:
            error = score_error(logits(0)[rows], exact)
            row.checks[name] = error
            need(error <= TOLERANCE, f"scores are off by {error}")

        return check

    def right_selection(name: str) -> Callable[[], None]:
        def check() -> None:
            seen = select(0).clone()
            need(same_sets(seen, selection(logits(0), k)), "not the k best of its own scores")
            row.checks[name] = overlap(seen[rows], expected)

        return check

    def right_topk() -> None:
        kept = scores.clone()
        need(same_sets(topk.select(scores, k, impl=impl), selection(kept, k)), "not the k best")
        need(torch.equal(scores, kept), "the scores were changed")

    for name, arch in FORMS.items():
        row.ours(f"logits {name}", logits, scores, right_logits(f"logits {name}: error"), arch)
        check = right_selection(f"select {name}: float64's choice")
        row.ours(f"select {name}", select, chosen, check, arch)
        if impl == "triton":
            row.ours(f"logits {name}, packed", *_packed(inputs), arch=arch)
    row.ours("top-k", lambda _: topk.select(scores, k, out=chosen, impl=impl), chosen, right_topk)
    _peers(row, inputs, k, rows, exact, expected, scores.clone(), impl)
    done = row.done()
    done["byte floor µs"] = batch * context * KEY_BYTES / rate * 1e6
    return done


def _packed(inputs: Decode) -> tuple[Call, Tensor]:
    """The logits that `select_paged` makes: rows one after the other, and nothing past their ends.

    Returns:
        the call, and the scores that it writes.
    """
    from indexer_service.kernels.mqa_logits.packed import PADDING, PackedScores, padded
    from indexer_service.kernels.mqa_logits.paged_launch import paged_packed

    rows, room = inputs.rows, inputs.rows * padded(inputs.context) + PADDING
    packed = PackedScores(
        scores=torch.zeros(room, device=DEVICE),
        row_at=torch.empty(rows, dtype=torch.int64, device=DEVICE),
        row_end=torch.empty(rows, dtype=torch.int32, device=DEVICE),
        arrived=torch.empty(rows, dtype=torch.int32, device=DEVICE),
    )
    limit = inputs.max_context
    return lambda call: paged_packed(*inputs.arguments(call), packed, limit=limit), packed.scores


def _peers(
    row: Row,
    inputs: Decode,
    k: int,
    rows: list[int],
    exact: Tensor,
    expected: Tensor,
    scores: Tensor,
    impl: str,
) -> None:
    lengths, context = inputs.row_lengths, inputs.context

    def right_logits(call: Call) -> None:
        seen: Tensor = call(0)  # type: ignore[assignment]
        seen = seen[rows, :context].masked_fill(exact == -torch.inf, -torch.inf)
        row.checks["DeepGEMM: error"] = score_error(seen, exact)

    def schedule() -> Call:
        metadata = peers.paged_metadata(inputs)
        return lambda _: metadata()

    row.peer("DeepGEMM logits", lambda: peers.paged_logits(inputs), right_logits)
    row.peer("DeepGEMM schedule", schedule)
    for name, make in peers.DECODE_TOPK.items():
        row.peer(name, lambda make=make: _alone(make(lengths, k, context), scores))
        chain = f"DeepGEMM + {name}"

        def right_chain(call: Call, chain: str = chain) -> None:
            share = overlap(call(0)[rows], expected)  # type: ignore[index]
            row.checks[f"{chain}: float64's choice"] = share
            need(share >= RIGHT, f"chose {share:.0%} of the right keys")

        row.peer(chain, lambda make=make: _chain(inputs, make(lengths, k, context)), right_chain)
    row.peer("torch.topk", lambda: _alone(peers.torch_topk(lengths, k, context), scores))
    chosen = torch.empty((inputs.rows, k), dtype=torch.int32, device=DEVICE)

    def ours(scores: Tensor) -> Tensor:
        return topk.select(scores, k, row_end=lengths.flatten(), out=chosen, impl=impl)

    row.peer("DeepGEMM + our top-k", lambda: _chain(inputs, ours))


def _alone(select: peers.TopK, scores: Tensor) -> Call:
    return lambda _: select(scores)


def _chain(inputs: Decode, select: peers.TopK) -> Call:
    """DeepGEMM's logits and a top-k, one after the other, as vLLM launches them."""
    score = peers.paged_logits(inputs)
    return lambda call: select(score(call))


def captured_for(
    heads: int, batch: int, context: int, longest: int, k: int, pool: Pool, impl: str
) -> dict[str, Any]:
    """The same step captured for its own context and for a much longer one."""
    calls = calls_for(batch, context)
    shape = {"H": heads, "B": batch, "context": context, "captured for": longest, "k": k}
    inputs = {room: Decode(heads, batch, context, room, calls, pool) for room in (context, longest)}
    chosen = torch.empty((batch, k), dtype=torch.int32, device=DEVICE)

    def refresh() -> None:
        for each in inputs.values():
            each.refresh()

    row = Row(shape | {"calls": calls}, calls, refresh)

    def select(room: int) -> Call:
        return lambda call: indexer.select_paged(
            *inputs[room].arguments(call), k, out=chosen, impl=impl
        )

    def same_answer() -> None:
        step = inputs[longest]
        short = step.tables[0][:, : inputs[context].tables.shape[2]]
        expected = indexer.select_paged(*step.arguments(0)[:4], short, k, impl=impl)
        need(torch.equal(select(longest)(0), expected), "another answer than a short capture's")  # type: ignore[arg-type]

    for name, arch in FORMS.items():
        row.ours(f"select {name}, own", select(context), chosen, arch=arch)
        row.ours(f"select {name}, long", select(longest), chosen, same_answer, arch)
    for name, make in peers.DECODE_TOPK.items():
        for label, room in (("own", context), ("long", longest)):
            step = inputs[room]
            row.peer(
                f"DeepGEMM + {name}, {label}",
                lambda step=step, make=make, room=room: _chain(
                    step, make(step.row_lengths, k, room)
                ),
            )
    return row.done()
