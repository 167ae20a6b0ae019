"""Races on the CPU transport: each function races once and returns the number of its step."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from dsa_indexer_cli.racelab.batches import Sort, places
from dsa_indexer_cli.racelab.bench import (
    GEOMETRY,
    PAGES,
    READ,
    SHARING_LAYER,
    SOON,
    Bench,
)
from dsa_indexer_cli.racelab.saboteurs import PinnedBuffer, open_gates, restaged_inputs
from indexer_client import StepInputs
from indexer_client.staging import stage_layer
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.findings import FindingKind

_FIRST, _LAST = GEOMETRY.layers
_NAN_CODE = 0x7F


def _one_token_more(inputs: StepInputs) -> torch.Tensor:
    """Lengths of the step behind."""
    return inputs.seq_lens + 1


def _late_lengths(bench: Bench, inputs: StepInputs) -> StepInputs:
    """Lengths in a pinned buffer that the next step rewrites while its copy is pending."""
    buffer = PinnedBuffer(bench, inputs.seq_lens)
    buffer.rewrite(_one_token_more(inputs))
    return replace(inputs, seq_lens=buffer.arrived())


def torn_lengths(bench: Bench) -> int:
    return bench.run(_late_lengths(bench, bench.batch(Sort())))


def torn_speculative_lengths(bench: Bench) -> int:
    """The CPU knows bounds only: what contradicts the lengths are the positions."""
    return bench.run(_late_lengths(bench, bench.batch(Sort(next_n=3, exact=False))))


def lengths_beyond_the_bound(bench: Bench) -> int:
    inputs = bench.batch(Sort(next_n=2, exact=False, tight=True))
    return bench.run(_late_lengths(bench, replace(inputs, positions=None, slots=None)))


def torn_offsets(bench: Bench) -> int:
    inputs = bench.batch(Sort(next_n=2, exact=False))
    buffer = PinnedBuffer(bench, inputs.query_start)
    buffer.rewrite(inputs.query_start // 2)  # the next step decodes one row a request
    torn = replace(inputs, query_start=buffer.arrived(), positions=None, slots=None)
    return bench.run(torn)


def torn_slots(bench: Bench) -> int:
    inputs = bench.batch(Sort())
    assert inputs.slots is not None
    lengths, table = _one_token_more(inputs).tolist(), inputs.block_table
    later = places([1] * inputs.requests, lengths, table, GEOMETRY.page_size)[1]
    buffer = PinnedBuffer(bench, inputs.slots)
    buffer.rewrite(later)
    return bench.run(replace(inputs, slots=buffer.arrived()))


def torn_table(bench: Bench) -> int:
    """The next step's table is that of a larger cache, of another group of layers."""
    inputs = bench.batch(Sort(exact=False))
    buffer = PinnedBuffer(bench, inputs.block_table)
    buffer.rewrite(inputs.block_table + PAGES)
    return bench.run(replace(inputs, block_table=buffer.arrived(), positions=None, slots=None))


def publish_race(bench: Bench) -> int:
    with open_gates(bench, of_layers=False):
        return bench.run(bench.batch(Sort(exact=False)))


def request_race(bench: Bench) -> int:
    with open_gates(bench, of_layers=True):
        return bench.run(bench.batch(Sort()))


def overwritten_inputs(bench: Bench) -> int:
    with restaged_inputs(bench):
        return bench.run(bench.batch(Sort(exact=False)))


def overwritten_query(bench: Bench) -> int:
    inputs = bench.batch(Sort())
    attachment, later = bench.attachment, bench.session._steps + 1 + GEOMETRY.slots
    query = bench.query(inputs.rows)
    bench.engine.before = lambda: stage_layer(attachment, later, 0, *query)
    return bench.run(inputs)


def answer_rung_too_early(bench: Bench) -> int:
    """The bell of an answer that is not written: what stands there is the answer before."""
    step = bench.session._steps + 1

    def ring() -> None:
        bench.service_control().bells.done(0, step)
        bench.attachment.wake_worker.ring()
        _until(lambda: bool(bench.of(step, FindingKind.STALE_ANSWER)))

    bench.engine.before = ring
    # The worker goes on inline, and the service waits for the next layer until the next step.
    return bench.run(bench.batch(Sort()), settled=False)


def answer_overwritten(bench: Bench) -> int:
    """A service that was given up writes its answer over the one that is being handed back."""
    inputs = bench.batch(Sort())
    query, out = bench.query(inputs.rows), bench.out[: inputs.rows]
    with bench.session.step(inputs) as step:
        step.stage(_FIRST, *query)
        answered = step.wait(_FIRST)
        generations = bench.service_control().generations.answers
        generations.begin(step.number + GEOMETRY.slots)
        step.hand_back(_FIRST, answered, out)
        bench.select(step, _LAST)
    bench.settle(step.number)
    return step.number


def gate_ended(bench: Bench) -> int:
    """The worker does not come to a layer within the gate's bound."""
    bench.session.wait_attached(SOON)  # so short a bound may have ended an attachment before
    inputs = bench.batch(Sort())
    with bench.session.step(inputs) as step:
        bench.settle(step.number)
        for layer in GEOMETRY.layers:
            bench.select(step, layer)
    bench.session.wait_attached(SOON)
    return step.number


def wait_ended(bench: Bench) -> int:
    """The service stops inside a selection; the worker attaches again afterwards."""
    session = bench.session
    session.wait_attached(SOON)
    step = session._steps + 1
    bench.engine.before = lambda: _until(lambda: bool(bench.attachment.detached_because))
    with session.step(bench.batch(Sort())) as entered:
        for layer in GEOMETRY.layers:
            bench.select(entered, layer)
    bench.engine.before = None
    with session.step(bench.batch(Sort())) as entered:  # lets go of the attachment
        for layer in GEOMETRY.layers:
            bench.select(entered, layer)
    session.wait_attached(SOON)
    return step


def leaked_selection(bench: Bench) -> int:
    """A layer that shares comes before the layer of its own forward that selects."""
    inputs = bench.batch(Sort())
    with bench.session.step(inputs) as step:
        step.share(SHARING_LAYER, bench.out[: inputs.rows])
        for layer in GEOMETRY.layers:
            bench.select(step, layer)
    bench.settle(step.number)
    return step.number


def nan_query(bench: Bench) -> int:
    inputs = bench.batch(Sort())
    q, weights = bench.query(inputs.rows)
    spoilt = q.clone()
    spoilt.view(torch.uint8)[-1, 0, 0] = _NAN_CODE
    with bench.session.step(inputs) as step:
        step.select(_FIRST, spoilt, weights, out=bench.out[: inputs.rows])
        bench.select(step, _LAST)
    bench.settle(step.number)
    return step.number


def nan_key(bench: Bench) -> int:
    """One token's scale is read before it was written: a single score of the row is NaN."""
    inputs = bench.batch(Sort())
    _, scales = planes(bench.k_caches[_FIRST].tensor)
    page = int(inputs.block_table[0, 0])
    kept = scales[page, 0].clone()
    scales[page, 0].view(torch.float32).fill_(torch.nan)
    try:
        return bench.run(inputs)
    finally:
        scales[page, 0] = kept


def _until(is_so: Callable[[], bool]) -> None:
    """Wait for it, as long as a service that nothing holds up would need."""
    deadline = time.monotonic() + READ
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.0002)
