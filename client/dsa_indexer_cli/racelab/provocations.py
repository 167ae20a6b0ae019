"""Every race that the lab provokes, each with the detector that must catch it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsa_indexer_cli.racelab.batches import GEOMETRY, PAGES, SHARING_LAYER, Sort, places
from dsa_indexer_cli.racelab.bench import HASTY, PATIENT, READ, SOON, Bench, Bounds
from dsa_indexer_cli.racelab.saboteurs import PinnedBuffer, open_gates, overwritten_inputs
from indexer_client import StepInputs
from indexer_client.staging import stage_layer
from indexer_service.kernels.k_cache.layout import planes
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import FindingKind

_FIRST, _LAST = GEOMETRY.layers
_NAN_CODE = 0x7F


@dataclass(frozen=True)
class Provocation:
    """Attributes:
    name: for people and reports.
    kind: of the finding that must be told of the step.
    detector: the one that tells.
    provoke: races once; the number of the step that raced.
    bounds: of the bench.
    """

    name: str
    kind: FindingKind
    detector: Detector
    provoke: Callable[[Bench], int]
    bounds: Bounds = PATIENT


def _one_token_more(inputs: StepInputs) -> torch.Tensor:
    """Lengths of the step behind."""
    return inputs.seq_lens + 1


def _late_lengths(bench: Bench, inputs: StepInputs) -> StepInputs:
    """Lengths in a pinned buffer that the next step rewrites while its copy is pending."""
    buffer = PinnedBuffer(bench, inputs.seq_lens)
    buffer.rewrite(_one_token_more(inputs))
    return replace(inputs, seq_lens=buffer.arrived())


def _torn_lengths(bench: Bench) -> int:
    return bench.run(_late_lengths(bench, bench.batch(Sort())))


def _torn_speculative_lengths(bench: Bench) -> int:
    """The CPU knows bounds only: what contradicts the lengths are the positions."""
    return bench.run(_late_lengths(bench, bench.batch(Sort(next_n=3, exact=False))))


def _lengths_beyond_the_bound(bench: Bench) -> int:
    inputs = bench.batch(Sort(next_n=2, exact=False, tight=True))
    return bench.run(_late_lengths(bench, replace(inputs, positions=None, slots=None)))


def _torn_offsets(bench: Bench) -> int:
    inputs = bench.batch(Sort(next_n=2, exact=False))
    buffer = PinnedBuffer(bench, inputs.query_start)
    buffer.rewrite(inputs.query_start // 2)  # the next step decodes one row a request
    torn = replace(inputs, query_start=buffer.arrived(), positions=None, slots=None)
    return bench.run(torn)


def _torn_slots(bench: Bench) -> int:
    inputs = bench.batch(Sort())
    assert inputs.slots is not None
    later = places([1] * inputs.requests, _one_token_more(inputs).tolist(), inputs.block_table)[1]
    buffer = PinnedBuffer(bench, inputs.slots)
    buffer.rewrite(later)
    return bench.run(replace(inputs, slots=buffer.arrived()))


def _torn_table(bench: Bench) -> int:
    """The next step's table is that of a larger cache, of another group of layers."""
    inputs = bench.batch(Sort(exact=False))
    buffer = PinnedBuffer(bench, inputs.block_table)
    buffer.rewrite(inputs.block_table + PAGES)
    return bench.run(replace(inputs, block_table=buffer.arrived(), positions=None, slots=None))


def _publish_race(bench: Bench) -> int:
    with open_gates(bench, of_layers=False):
        return bench.run(bench.batch(Sort(exact=False)))


def _request_race(bench: Bench) -> int:
    with open_gates(bench, of_layers=True):
        return bench.run(bench.batch(Sort()))


def _overwritten_inputs(bench: Bench) -> int:
    with overwritten_inputs(bench):
        return bench.run(bench.batch(Sort(exact=False)))


def _overwritten_query(bench: Bench) -> int:
    inputs = bench.batch(Sort())
    attachment, later = bench.attachment, bench.session._steps + 1 + GEOMETRY.slots
    query = bench.query(inputs.rows)
    bench.engine.before = lambda: stage_layer(attachment, later, 0, *query)
    return bench.run(inputs)


def _answer_rung_too_early(bench: Bench) -> int:
    """The bell of an answer that is not written: what stands there is the answer before."""
    step = bench.session._steps + 1

    def ring() -> None:
        bench.service_control().bells.done(0, step)
        bench.attachment.wake_worker.ring()
        _until(lambda: bool(bench.of(step, FindingKind.STALE_ANSWER)))

    bench.engine.before = ring
    # The worker goes on inline, and the service waits for the next layer until the next step.
    return bench.run(bench.batch(Sort()), settled=False)


def _answer_overwritten(bench: Bench) -> int:
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


def _gate_ended(bench: Bench) -> int:
    """The worker does not come to a layer within the gate's bound."""
    inputs = bench.batch(Sort())
    with bench.session.step(inputs) as step:
        bench.settle(step.number)
        for layer in GEOMETRY.layers:
            bench.select(step, layer)
    bench.session.wait_attached(SOON)
    return step.number


def _wait_ended(bench: Bench) -> int:
    """The service stops inside a selection; the worker attaches again afterwards."""
    session = bench.session
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


def _leaked_selection(bench: Bench) -> int:
    """A layer that shares comes before the layer of its own forward that selects."""
    inputs = bench.batch(Sort())
    with bench.session.step(inputs) as step:
        step.share(SHARING_LAYER, bench.out[: inputs.rows])
        for layer in GEOMETRY.layers:
            bench.select(step, layer)
    bench.settle(step.number)
    return step.number


def _nan_query(bench: Bench) -> int:
    inputs = bench.batch(Sort())
    q, weights = bench.query(inputs.rows)
    spoilt = q.clone()
    spoilt.view(torch.uint8)[-1, 0, 0] = _NAN_CODE
    with bench.session.step(inputs) as step:
        step.select(_FIRST, spoilt, weights, out=bench.out[: inputs.rows])
        bench.select(step, _LAST)
    bench.settle(step.number)
    return step.number


def _nan_key(bench: Bench) -> int:
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


PROVOCATIONS = (
    Provocation(
        "pinned buffer: step N reads step N+1's lengths", FindingKind.TORN_INPUT,
        Detector.INPUTS, _torn_lengths,
    ),
    Provocation(
        "pinned buffer under speculative decoding: bounds only", FindingKind.BAD_POSITION,
        Detector.POSITIONS, _torn_speculative_lengths,
    ),
    Provocation(
        "pinned buffer: a length beyond its bound", FindingKind.BAD_LENGTH, Detector.INPUTS,
        _lengths_beyond_the_bound,
    ),
    Provocation(
        "pinned buffer: query offsets", FindingKind.BAD_QUERY_OFFSETS, Detector.INPUTS,
        _torn_offsets,
    ),
    Provocation(
        "pinned buffer: slot mapping", FindingKind.BAD_SLOT, Detector.POSITIONS, _torn_slots
    ),
    Provocation("pinned buffer: block table", FindingKind.BAD_PAGE, Detector.INPUTS, _torn_table),
    Provocation(
        "publish race: lengths read before they are written", FindingKind.READ_BEFORE_WRITTEN,
        Detector.GENERATIONS, _publish_race,
    ),
    Provocation(
        "request race: q read before it is written", FindingKind.READ_BEFORE_WRITTEN,
        Detector.GENERATIONS, _request_race,
    ),
    Provocation(
        "lengths overwritten while they are copied", FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS, _overwritten_inputs,
    ),
    Provocation(
        "q overwritten while it is scored", FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS, _overwritten_query,
    ),
    Provocation(
        "answer rung before it is written", FindingKind.STALE_ANSWER, Detector.GENERATIONS,
        _answer_rung_too_early,
    ),
    Provocation(
        "answer overwritten while it is handed back", FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS, _answer_overwritten,
    ),
    Provocation(
        "shared indices of another step", FindingKind.SHARED_INDEX_LEAK, Detector.SHARED_INDICES,
        _leaked_selection,
    ),
    Provocation("NaN in q", FindingKind.NAN_SCORES, Detector.NAN_SCORES, _nan_query),
    Provocation("NaN in one key's scale", FindingKind.NAN_SCORES, Detector.NAN_SCORES, _nan_key),
    Provocation(
        "gate without its worker", FindingKind.WAIT_ENDED, Detector.WAITS, _gate_ended, HASTY
    ),
    Provocation(
        "wait without its service", FindingKind.WAIT_ENDED, Detector.WAITS, _wait_ended, HASTY
    ),
)  # fmt: skip
