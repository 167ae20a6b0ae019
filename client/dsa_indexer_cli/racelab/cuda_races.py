"""Races on a GPU: each function races once and returns the number of its step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.cuda_bench import (
    HASTY,
    OPEN,
    PAGES,
    PATIENT,
    PENDING_CYCLES,
    CudaBench,
    Terms,
)
from dsa_indexer_cli.racelab.provocation import Provocation
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import FindingKind

_UNPUBLISHED_CYCLES = 5 * PENDING_CYCLES
"""Longer than a service needs to take the plan, enqueue the step, and read."""
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
