"""Whole steps of a service on a GPU, interpreted: `python -m tests.service.device_step_cases`.

Words that the worker rings are set beforehand, since no kernel runs beside another, and gates have
no patience. Prints one JSON line a case, and one a fault planted into it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import torch
from triton.runtime import interpreter

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.racelab.cuda_service import open_gate
from indexer_service import device_executor, step_graphs, step_kernels
from indexer_service.device_executor import DeviceExecutor
from indexer_service.executor import StepCancelled
from indexer_service.kernels.device_inputs import DeviceInputs, copy_checked, numbers_size
from indexer_service.step_kernels import LaunchShape, StepKernels, tensor_at
from ipc_handoff.device_layout import AnswersWord, StagingWord
from ipc_handoff.findings import FindingKind
from ipc_handoff.layout import HandoffGeometry
from tests.service import device_race_cases
from tests.service.device_step_bench import CPU, GEOMETRY, Bench
from tests.service.hand_worker import UNWRITTEN
from tests.support.cases import tell


def decode_of_every_size() -> None:
    bench = Bench()
    captured = bench.stream.captured
    assert captured == 2 * 4  # buckets of 1, 2, 4 and 6 requests, for each slot
    for requests in range(1, GEOMETRY.max_requests + 1):
        step = bench.worker.make([1] * requests, [50 * n + 3 for n in range(1, requests + 1)])
        bench.check(step, bench.run(step))
    assert bench.stream.launched == GEOMETRY.max_requests
    assert bench.stream.captured == captured


def unknown_lengths() -> None:
    bench = Bench()
    step = bench.worker.make([1, 1, 1], [90, 0, 384], exact_lengths=False)
    bench.check(step, bench.run(step))


def two_rows_a_request_without_a_graph() -> None:
    bench = Bench()
    bench.executor._prepared.add(2)
    step = bench.worker.make([2, 2, 2], [300, 2, 77])
    bench.check(step, bench.run(step))
    assert not bench.stream.launched
    bench.executor._make(2, lambda: False)
    step = bench.worker.make([2, 2, 2], [30, 200, 7])
    bench.check(step, bench.run(step))
    assert bench.stream.launched == 1


def mixed() -> None:
    bench = Bench()
    step = bench.worker.make([1, 1, 7, 30], [200, 9, 60, 300], decode=2)
    bench.check(step, bench.run(step))
    step = bench.worker.make([9, 20], [380, 20], decode=0, exact_lengths=False)
    bench.check(step, bench.run(step))


def one_request_or_one_row() -> None:
    """Geometries in which no decode request fits beside a prefill request."""
    run = StepKernels.launch
    for max_requests, max_rows in ((1, 1), (1, 8), (3, 1)):
        geometry = replace(GEOMETRY, max_requests=max_requests, max_rows=max_rows)
        made = []

        def launch(kernels: StepKernels, shape: LaunchShape, *rest: Any, made: Any = made) -> None:
            made.append((shape.decode_requests > 0, shape.decode_requests < shape.requests))
            run(kernels, shape, *rest)

        try:
            with patch.object(StepKernels, "launch", launch):
                bench = Bench(geometry=geometry)
        except ValueError as error:
            raise AssertionError(f"{max_requests} requests, {max_rows} rows: {error}") from error
        assert made == [(True, False), (False, True)], made
        for length in (384, 7):
            step = bench.worker.make([1], [length])
            bench.check(step, bench.run(step))
        step = bench.worker.make([max_rows], [90], decode=0)
        bench.check(step, bench.run(step))


def a_bucket_that_has_no_room() -> None:
    inputs = DeviceInputs(1, 6, CPU)
    numbers = torch.zeros(numbers_size(1), dtype=torch.int32)
    offsets, lengths = torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    table = torch.zeros(2, 6, dtype=torch.int32)
    try:
        copy_checked(inputs, numbers, offsets, lengths, table, bucket=2, pages=1, page_size=64)
    except ValueError as error:
        assert str(error).startswith("bucket: 2 requests, inputs hold 1 (fix: "), error
    else:
        raise AssertionError("not refused")


def launches_are_told() -> None:
    """No fewer than there are: who launches waits before the queue is full."""
    bench = Bench()
    step = bench.worker.make([1, 1, 7, 30], [200, 9, 60, 300], decode=2)
    bench.worker.publish(step)
    made, told = 0, 0
    call = interpreter.GridExecutor.__call__

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        made += 1
        return call(*arguments, **named)

    def spend(launches: int) -> None:
        nonlocal told
        told += launches

    kernels = bench.executor._kernels
    assert kernels is not None
    shape = bench.executor._shape(step.plan, list(step.plan.exact.query_start))
    with patch.object(interpreter.GridExecutor, "__call__", counted):
        kernels.launch(shape, list(bench.worker.k_caches.values()), spend)
    prefill = step.plan.requests - step.plan.decode_requests
    fills = prefill * len(GEOMETRY.layers)  # torch's own kernels
    assert made + fills <= told <= 3 * made, (made, told)


def faults() -> None:
    bench = Bench()
    step = bench.worker.make([1, 1, 1, 5], [100, 200, 300, 70], decode=3)
    step.seq_lens[0] += 1
    step.block_table[2, 4] = 40
    step.query_start[4] -= 1
    report = bench.run(step)
    bench.check(step, report)
    assert report.fault_count == 7
    assert [(f.row, f.request, f.expected, f.seen) for f in report.faults] == [
        (0, 0, 100, 101), (2, 2, 40, 40), *((row, 3, 8, 7) for row in range(3, 8)),
    ]  # fmt: skip
    assert report.faults[1].reason == pb.ROW_FAULT_REASON_PAGE_OUT_OF_BOUNDS
    kinds = [FindingKind.TORN_INPUT, FindingKind.BAD_PAGE, FindingKind.BAD_QUERY_OFFSETS]
    assert bench.found.kinds == kinds
    assert [(f.row, f.request) for f in bench.found.findings] == [(0, "#0"), (2, "#2"), (3, "#3")]


def publish_race() -> None:
    """The race lab's service does not wait: it reads what the step before left in the slot."""
    with patch.object(step_kernels, "gate", open_gate):
        bench = Bench()
        slots = GEOMETRY.slots
        for length in range(50, 50 + slots):
            step = bench.worker.make([1, 1], [length, length])
            bench.check(step, bench.run(step))
        assert not bench.found.findings
        late = bench.worker.make([1, 1], [90, 60])
        bench.worker.publish(late)
        # As it still is on a GPU whose worker's stream is late.
        at = bench.worker.staging + GEOMETRY.device.staging_at(late.plan.step % slots)
        lengths = tensor_at(at + GEOMETRY.device.seq_lens, (2,), torch.int32, CPU)
        lengths.fill_(50)
        with bench.staging(late):
            report = bench.finish(late)
    assert report.fault_count == 2
    assert bench.found.kinds == [FindingKind.TORN_INPUT] * 2
    assert [(f.expected, f.seen) for f in bench.found.findings] == [("90", "50"), ("60", "50")]


def not_published() -> None:
    """The slot holds a step of before, which must not be answered in place of this one."""
    bench = Bench()
    first = bench.worker.make([1, 1], [100, 50])
    bench.check(first, bench.run(first))
    bench.worker.make([1], [1])
    late = bench.worker.make([1, 1], [90, 60])
    bench.answers(late.plan.step).fill_(UNWRITTEN)
    report = bench.finish(late)
    assert "did not come" in report.message
    assert not report.answered_layers and not report.faults
    assert (bench.answers(late.plan.step) == UNWRITTEN).all()
    assert int(bench.word(bench.worker.answers, AnswersWord.CANCELLED)) == late.plan.step


def second_layer_does_not_come() -> None:
    bench = Bench()
    step = bench.worker.make([1, 1, 1], [100, 50, 7])
    step.seq_lens[1] += 1
    report = bench.run(step, staged=1)
    assert "did not come" in report.message
    assert list(report.answered_layers) == [3]
    assert report.fault_count == 1
    assert int(bench.word(bench.worker.answers, AnswersWord.DONES)) == step.plan.step
    assert int(bench.word(bench.worker.answers, AnswersWord.DONES + 1)) == 0
    (_, late) = bench.found.findings
    assert (late.kind, late.step, late.layer) == (FindingKind.WAIT_ENDED, step.plan.step, 7)


def _ends_with(message: str, spoil: Callable[[Bench], None]) -> None:
    bench = Bench(gate_bound=1.0)  # the interpreter's clock stands still
    step = bench.worker.make([1, 1], [100, 50])
    spoil(bench)
    report = bench.finish(step)
    assert message in report.message, report.message
    step = bench.worker.make([1, 1], [100, 50])


def newer() -> None:
    def publish_newer(bench: Bench) -> None:
        bench.word(bench.worker.staging, StagingWord.PUBLISHED)[0] = 9

    _ends_with("published a newer step", publish_newer)


def detached() -> None:
    def detach(bench: Bench) -> None:
        bench.word(bench.worker.staging, StagingWord.DETACHED)[0] = 1

    _ends_with("the worker detached", detach)


def closing() -> None:
    _ends_with("the session is closing", lambda bench: bench.executor.interrupt())


def refused_plans_are_given_up() -> None:
    bench = Bench()
    cancelled = bench.word(bench.worker.answers, AnswersWord.CANCELLED)
    bench.executor.give_up(4)
    assert int(cancelled) == 4
    step = bench.worker.make([1], [9], step=6)
    bench.check(step, bench.run(step))
    bench.executor.give_up(6)  # it was launched: told again, it might hide a newer one
    assert int(cancelled) == 4


def stamps() -> None:
    bench = Bench()
    trace = pb.TraceContext(trace_id=bytes(16), span_id=bytes(8), flags=1)
    times = []
    for _ in range(2):
        step = bench.worker.make([1], [9], trace=trace)
        bench.worker.publish(step)
        with bench.staging(step):
            begun = bench.executor.begin(step.plan, pb.StepReport())
        begun.finish()
        times.append(begun.times())
    assert all(found is not None and len(found) == len(GEOMETRY.layers) for found in times)
    assert all(found is not None and found.clock_error is not None for found in times)
    assert not bench.executor.lost_stamps
    ours = bench.executor._kernels
    assert ours is not None
    with patch.object(ours, "stamps_of", lambda step: StepKernels.stamps_of(ours, step - 1)):
        begun = bench.executor.begin(bench.worker.make([1], [9], trace=trace).plan, pb.StepReport())
    with suppress(StepCancelled):
        begun.finish()
    assert begun.times() is None
    assert bench.executor.lost_stamps == 1


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        decode_of_every_size, unknown_lengths, two_rows_a_request_without_a_graph, mixed,
        one_request_or_one_row, a_bucket_that_has_no_room, launches_are_told, faults,
        publish_race,
        not_published, second_layer_does_not_come, newer, detached, closing,
        refused_plans_are_given_up, stamps,
    )
}  # fmt: skip


def _planted() -> Iterator[tuple[Any, ...]]:
    """name, the case, and what is replaced by what: a guard that is taken out."""
    yield "a step of before passes the gate", not_published, step_kernels, "gate", _no_gate
    yield "given up in any order", refused_plans_are_given_up, DeviceExecutor, "give_up", _tell_all
    name = "a first launch that does not fit"
    yield name, one_request_or_one_row, device_executor, "first_shapes", _mixed_always
    yield "faults are not looked at", faults, step_kernels, "copy_checked", _unchecked
    yield from device_race_cases.planted()
    yield "nor of a publish race", publish_race, step_kernels, "copy_checked", _unchecked


def _no_gate(memory: Any, kind: Any, **_: Any) -> None:
    """As if the words were right."""
    memory.live[:] = torch.tensor(
        [1, 1, 0, 0, int(memory.live[4]) if kind else 0], dtype=torch.int32
    )


def _mixed_always(geometry: HandoffGeometry) -> list[LaunchShape]:
    return [step_graphs._smallest(decode_requests=1, requests=2)]


def _tell_all(executor: DeviceExecutor, step: int) -> None:
    assert executor._kernels is not None
    executor._kernels.give_up(step)


def _unchecked(
    inputs: Any, numbers: Any, query_start: Any, seq_lens: Any, table: Any, **named: Any
) -> None:
    bucket = named["bucket"]
    inputs.seq_lens[:bucket] = seq_lens[:bucket].clamp(0, 384)
    inputs.block_table[:bucket] = table[:bucket].clamp(0, 39)
    inputs.faults.zero_()


if __name__ == "__main__":
    import_module("tests.gates.interpreter")  # importing it puts the repair in place
    tell(CASES | device_race_cases.CASES, _planted())
