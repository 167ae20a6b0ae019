"""Races on a GPU: each function races once and returns the number of its step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attention_worker import device_handoff, inline_kernels
from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.cuda_bench import (
    GEOMETRY,
    HASTY,
    OPEN,
    PAGES,
    PATIENT,
    PENDING_CYCLES,
    CudaBench,
    Terms,
)
from dsa_indexer_cli.racelab.provocation import Provocation
from ipc_handoff.banks import ANSWERS, STAGING
from ipc_handoff.detectors import Detector
from ipc_handoff.device_layout import DEVICE_LINE, AnswersWord, SlotLine
from ipc_handoff.findings import FindingKind
from ipc_handoff.generations import Generation
from ipc_handoff.regions import TensorSpec

_UNPUBLISHED_CYCLES = 5 * PENDING_CYCLES
"""Longer than a service needs to take the plan, enqueue the step, and read."""
_NAN_CODE = 0x7F
_LATE_CYCLES = 40 * PENDING_CYCLES
"""Twice the hasty gate's bound, and a bit."""


def delay(cycles: int) -> None:
    """Let the worker's stream be busy for so long."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def rewritten(values: Tensor, later: Callable[[Tensor], Tensor]) -> Tensor:
    """What arrives on the device from a pinned buffer that is rewritten while its copy is pending.

    Kernels stand in front of the copy in the stream, as those of the step before do in an engine;
    the host goes on at once and writes the next step's values. Nothing waits here.
    """
    host = values.cpu().pin_memory()
    following = later(host.clone())
    device = torch.empty_like(values)
    delay(PENDING_CYCLES)
    device.copy_(host, non_blocking=True)
    host.copy_(following)
    return device


def torn_lengths(bench: CudaBench) -> int:
    inputs = bench.batch(Sort())
    return bench.run(replace(inputs, seq_lens=rewritten(inputs.seq_lens, lambda all: all + 1)))


def lengths_beyond_the_bound(bench: CudaBench) -> int:
    """The CPU knows bounds only, as under asynchronous speculative decoding."""
    inputs = bench.batch(Sort(next_n=2, exact=False, tight=True))
    return bench.run(replace(inputs, seq_lens=rewritten(inputs.seq_lens, lambda all: all + 1)))


def torn_offsets(bench: CudaBench) -> int:
    inputs = bench.batch(Sort(next_n=2))
    torn = rewritten(inputs.query_start, lambda all: all // 2)
    return bench.run(replace(inputs, query_start=torn))


def torn_table(bench: CudaBench) -> int:
    inputs = bench.batch(Sort())
    torn = rewritten(inputs.block_table, lambda all: all + PAGES)
    return bench.run(replace(inputs, block_table=torn))


def torn_speculative_lengths(bench: CudaBench) -> int:
    """The CPU knows bounds only: what contradicts the lengths are the positions."""
    inputs = bench.batch(Sort(next_n=3, exact=False))
    return bench.run(replace(inputs, seq_lens=rewritten(inputs.seq_lens, lambda all: all + 1)))


def torn_slots(bench: CudaBench) -> int:
    inputs = bench.batch(Sort())
    assert inputs.slots is not None
    return bench.run(replace(inputs, slots=rewritten(inputs.slots, lambda all: all + 1)))


def _word(bench: CudaBench, region: str, at: int) -> Tensor:
    """A word of the bank, int64 [1]: what is written there goes by the worker's stream."""
    spec = TensorSpec((1,), torch.int64)
    return bench.bank.memories[region].tensor(at, spec.byte_size, spec, region)


def _holds(bench: CudaBench, region: str, line: SlotLine, held: Generation) -> None:
    """Let a slot be another's, from here on in the worker's stream."""
    layout, slot = GEOMETRY.device, held.step % GEOMETRY.slots
    begin = layout.staging_at(slot) if region == STAGING else layout.answers_at(slot)
    _word(bench, region, begin + line * DEVICE_LINE).fill_(held.word)


def overwritten_inputs(bench: CudaBench) -> int:
    """A later step's lengths are being written over those that the service copies."""
    inputs = bench.batch(Sort())
    step = bench.begin(inputs)
    later = Generation(step + GEOMETRY.slots, 0, is_written=False)
    _holds(bench, STAGING, SlotLine.INPUTS, later)
    bench.select(inputs.rows)
    torch.cuda.current_stream().synchronize()
    return step


def _between(bench: CudaBench, before: str, race: Callable[[int], None]) -> int:
    """A step in which something is enqueued in front of a kernel of each layer."""
    inputs = bench.batch(Sort())
    real = getattr(device_handoff, before)
    step = bench.begin(inputs)

    def raced(memory: Any, *arguments: Any, ordinal: int, **options: Any) -> None:
        race(ordinal)
        real(memory, *arguments, ordinal=ordinal, **options)

    with mock.patch.object(device_handoff, before, raced):
        bench.select(inputs.rows)
    torch.cuda.current_stream().synchronize()
    return step


def answer_rung_too_early(bench: CudaBench) -> int:
    """The bell of an answer that is not written: what stands there is the answer before."""
    step = bench.next_step

    def ring(ordinal: int) -> None:
        _word(bench, ANSWERS, (AnswersWord.DONES + ordinal) * DEVICE_LINE).fill_(step)

    return _between(bench, "stage", ring)


def answer_overwritten(bench: CudaBench) -> int:
    """A service that was given up writes its answer over the one that is being handed back."""
    later = Generation(bench.next_step + GEOMETRY.slots, 0, is_written=False)
    with mock.patch.object(inline_kernels.InlineLayer, "answer_or_rescue", lambda *_, **__: False):
        return _between(
            bench, "hand_back", lambda ordinal: _holds(bench, ANSWERS, SlotLine.LAYER, later)
        )


def leaked_selection(bench: CudaBench) -> int:
    """A layer that shares comes before the layer of its own forward that selects."""
    inputs = bench.batch(Sort())
    step = bench.begin(inputs)
    bench.indexer.share(GEOMETRY.layers[0], bench.out[: inputs.rows])
    bench.select(inputs.rows)
    torch.cuda.current_stream().synchronize()
    return step


def nan_query(bench: CudaBench) -> int:
    inputs = bench.batch(Sort())
    step = bench.begin(inputs)
    for layer in GEOMETRY.layers:
        q, weights = bench.query(inputs.rows)
        spoilt = q.clone()
        spoilt[-1, 0, 0] = _NAN_CODE
        bench.indexer.select(layer, spoilt, weights, bench.out[: inputs.rows])
    torch.cuda.current_stream().synchronize()
    return step


def publish_race(bench: CudaBench) -> int:
    """The plan is there, the service does not wait, and the worker's stream has not written yet."""
    delay(_UNPUBLISHED_CYCLES)
    return bench.run(bench.batch(Sort()))


def gate_ended(bench: CudaBench) -> int:
    """The worker's stream does not come to its first layer within the gate's bound."""
    inputs = bench.batch(Sort())
    step = bench.begin(inputs)
    delay(_LATE_CYCLES)
    bench.select(inputs.rows)
    torch.cuda.current_stream().synchronize()
    return step


PROVOCATIONS: tuple[Provocation[CudaBench, Terms], ...] = (
    Provocation(
        "pinned buffer: step N reads step N+1's lengths",
        FindingKind.TORN_INPUT,
        Detector.INPUTS,
        torn_lengths,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: a length beyond its bound",
        FindingKind.BAD_LENGTH,
        Detector.INPUTS,
        lengths_beyond_the_bound,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: query offsets",
        FindingKind.BAD_QUERY_OFFSETS,
        Detector.INPUTS,
        torn_offsets,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: block table",
        FindingKind.BAD_PAGE,
        Detector.INPUTS,
        torn_table,
        PATIENT,
    ),
    Provocation(
        "pinned buffer under speculative decoding: bounds only",
        FindingKind.BAD_POSITION,
        Detector.POSITIONS,
        torn_speculative_lengths,
        PATIENT,
    ),
    Provocation(
        "pinned buffer: slot mapping",
        FindingKind.BAD_SLOT,
        Detector.POSITIONS,
        torn_slots,
        PATIENT,
    ),
    Provocation(
        "lengths overwritten while they are copied",
        FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS,
        overwritten_inputs,
        PATIENT,
    ),
    Provocation(
        "answer rung before it is written",
        FindingKind.STALE_ANSWER,
        Detector.GENERATIONS,
        answer_rung_too_early,
        PATIENT,
    ),
    Provocation(
        "answer overwritten while it is handed back",
        FindingKind.OVERWRITTEN_BEFORE_READ,
        Detector.GENERATIONS,
        answer_overwritten,
        PATIENT,
    ),
    Provocation(
        "shared indices of another step",
        FindingKind.SHARED_INDEX_LEAK,
        Detector.SHARED_INDICES,
        leaked_selection,
        PATIENT,
    ),
    Provocation("NaN in q", FindingKind.NAN_SCORES, Detector.NAN_SCORES, nan_query, PATIENT),
    Provocation(
        "publish race: lengths read before they are written",
        FindingKind.TORN_INPUT,
        Detector.INPUTS,
        publish_race,
        OPEN,
    ),
    Provocation(
        "gate without its worker",
        FindingKind.WAIT_ENDED,
        Detector.WAITS,
        gate_ended,
        HASTY,
    ),
)
