"""Steps of a service on a GPU: the inline selection's bits, in every way to batch and to end."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.engine import EngineSettings
from indexer_service.engines.triton import TritonEngine
from indexer_service.events import StepObserver
from indexer_service.kernels.compilation import count_compilations
from ipc_handoff.device_layout import StagingWord
from ipc_handoff.stamps import StepTimes
from tests.service.gpu_bench import GEOMETRY, GpuBench
from tests.service.hand_worker import UNWRITTEN, HandStep
from tests.support.waiting import eventually

pytestmark = pytest.mark.gpu

LENGTHS = random.Random(3)


def lengths(count: int) -> list[int]:
    return [LENGTHS.randint(1, GEOMETRY.max_context) for _ in range(count)]


@pytest.fixture(scope="module")
def engine() -> TritonEngine:
    made = TritonEngine(EngineSettings(256 << 20, 1, torch.device("cuda", 0)))
    made.warm_up()
    return made


@pytest.fixture
def bench(engine: TritonEngine) -> Iterator[GpuBench]:
    made = GpuBench(engine)
    yield made
    made.close()


def decode(bench: GpuBench, requests: int, each: int = 1, **plan: object) -> HandStep:
    return bench.worker.make([each] * requests, lengths(requests), **plan)  # type: ignore[arg-type]


def answered(bench: GpuBench, step: HandStep) -> None:
    """The step is run, and everything about it is right."""
    bench.submit(step)
    out = bench.forward(step)
    bench.check(step, out)
    report = bench.report_of(step)
    assert report.status == pb.STEP_STATUS_ANSWERED, report.message
    assert list(report.answered_layers) == list(step.plan.layers)
    assert not report.fault_count


def test_decode_steps_of_every_size(bench: GpuBench) -> None:
    graphs = bench.stream.graphs
    assert graphs == 7 * GEOMETRY.slots
    sizes = [*range(1, 10), 33, 64]
    for size in sizes:
        answered(bench, decode(bench, size))
    assert bench.stream.launched == len(sizes)
    assert bench.stream.graphs == graphs


def test_a_session_of_one_request_and_one_row(engine: TritonEngine) -> None:
    bench = GpuBench(engine, geometry=replace(GEOMETRY, max_requests=1, max_rows=1))
    try:
        for _ in range(3):
            answered(bench, decode(bench, 1))
        answered(bench, bench.worker.make([1], lengths(1), decode=0))
    finally:
        bench.close()


def test_lengths_that_only_the_device_knows(bench: GpuBench) -> None:
    for size in (1, 5):
        answered(bench, decode(bench, size, exact_lengths=False))


def test_mixed_and_prefill_steps(bench: GpuBench) -> None:
    for rows_of, decode_requests in (
        ([1, 1, 1, 90], 3), ([64, 1, 30], 0), ([1] * 20 + [7, 100], 20), ([160], 0),
    ):  # fmt: skip
        some = [max(n, rows) for n, rows in zip(lengths(len(rows_of)), rows_of, strict=True)]
        step = bench.worker.make(rows_of, some, decode=decode_requests)
        answered(bench, step)
    some = [max(n, 20) for n in lengths(3)]
    answered(bench, bench.worker.make([1, 20, 9], some, decode=1, exact_lengths=False))
    assert bench.stream.launched == 0


def test_steps_that_follow_each_other_without_a_pause(bench: GpuBench) -> None:
    steps = [decode(bench, LENGTHS.randint(1, 64)) for _ in range(24)]
    outs = []
    for step in steps:
        bench.post(step)
        outs.append(bench.forward(step))
    for step, out in zip(steps, outs, strict=True):
        bench.check(step, out)
    assert eventually(lambda: bench.runner.answered_steps == len(steps))


def test_nothing_compiles_after_the_warm_up(bench: GpuBench) -> None:
    answered(bench, decode(bench, 3))  # the worker's own kernels
    answered(bench, bench.worker.make([1, 40], [700, 800], decode=1))
    with count_compilations() as compiled:
        for size in (1, 2, 17, 64):
            answered(bench, decode(bench, size))
        for rows in (1, 3, 50, 159):
            answered(bench, bench.worker.make([1, rows], [5000, 6000], decode=1))
    service = [name for name in compiled if "publish" not in name and "stage" not in name]
    assert not service


def test_other_rows_a_request_are_given_up_while_kernels_are_made(bench: GpuBench) -> None:
    deadline = time.monotonic() + 60
    while True:
        step = decode(bench, 3, each=2)
        bench.submit(step)
        out = bench.forward(step)
        bench.work.synchronize()
        report = bench.report_of(step)
        if report.status == pb.STEP_STATUS_ANSWERED:
            break
        assert report.status == pb.STEP_STATUS_CANCELLED
        assert (out == UNWRITTEN).all()
        assert time.monotonic() < deadline
    bench.check(step, out)
    assert eventually(lambda: bench.stream.graphs == 14 * GEOMETRY.slots, 20)
    launched = bench.stream.launched
    answered(bench, decode(bench, 5, each=2))
    assert bench.stream.launched == launched + 1


def test_a_worker_that_does_not_come_costs_one_bound(engine: TritonEngine) -> None:
    bench = GpuBench(engine, gate_bound=0.2)
    try:
        answered(bench, decode(bench, 2))
        late = decode(bench, 2)
        bench.submit(late)
        began = time.monotonic()
        report = bench.report_of(late)
        assert 0.15 < time.monotonic() - began < 1.5
        assert report.status == pb.STEP_STATUS_CANCELLED
        assert "did not come" in report.message
        answered(bench, decode(bench, 2))
    finally:
        bench.close()


def test_a_newer_step_ends_an_older_one_at_once(bench: GpuBench) -> None:
    older, newer = decode(bench, 2), decode(bench, 3)
    bench.submit(older)
    answered(bench, newer)
    report = bench.report_of(older)
    assert report.status == pb.STEP_STATUS_CANCELLED
    assert report.message == "the worker has published a newer step"


def test_a_detached_worker_ends_a_step_at_once(bench: GpuBench) -> None:
    step = decode(bench, 2)
    bench.submit(step)
    bench.ring(bench.worker.staging, StagingWord.DETACHED, 1)
    assert bench.report_of(step).message == "the worker detached"


def test_closing_ends_a_step_at_once_and_drains(engine: TritonEngine) -> None:
    bench = GpuBench(engine, gate_bound=20.0)
    steps = [decode(bench, 2), decode(bench, 3)]
    for step in steps:
        bench.submit(step)
    assert eventually(lambda: bench.runner.last_step == 2)
    began = time.monotonic()
    assert bench.close() == 2
    assert time.monotonic() - began < 5
    assert {report.message for report in bench.reports} == {"the session is closing"}
    assert bench.worker.control.bells.is_drained()


def test_closing_frees_a_thread_that_waits_for_room_to_launch(engine: TritonEngine) -> None:
    """More launches than CUDA queues: the runner's thread waits inside of one of them."""
    many = replace(GEOMETRY, layers=tuple(range(61)), max_requests=4)
    bench = GpuBench(engine, geometry=many, gate_bound=30.0, pages=64)
    for _ in range(2):
        some = bench.worker.make([1, 20, 30, 40], [60, 70, 80, 90], decode=1)
        bench.submit(some)
    assert eventually(lambda: bench.runner.last_step == 1)
    time.sleep(1)
    began = time.monotonic()
    bench.close()
    assert time.monotonic() - began < 10
    assert [report.message for report in bench.reports] == ["the session is closing"] * 2
    assert bench.worker.control.bells.is_drained()


def test_faults_are_reported_and_their_neighbours_are_right(bench: GpuBench) -> None:
    step = bench.worker.make([1] * 6, [4000] * 6)
    step.seq_lens[1] -= 1
    step.block_table[3, 5] = 256
    step.block_table[4, 60] = -1
    bench.submit(step)
    bench.check(step, bench.forward(step))
    report = bench.report_of(step)
    assert [(f.row, f.expected, f.seen) for f in report.faults] == [
        (1, 4000, 3999), (3, 256, 256), (4, 256, -1),
    ]  # fmt: skip
    step = bench.worker.make([1, 1, 30], [100, 4000, 300], decode=2, exact_lengths=False)
    step.seq_lens[0] = 4001
    step.seq_lens[2] = -5
    bench.submit(step)
    bench.check(step, bench.forward(step))
    report = bench.report_of(step)
    assert report.status == pb.STEP_STATUS_ANSWERED
    assert report.fault_count == 31
    assert [f.reason for f in report.faults[:2]] == [
        pb.ROW_FAULT_REASON_LENGTH_OUT_OF_BOUNDS, pb.ROW_FAULT_REASON_NEGATIVE_LENGTH,
    ]  # fmt: skip


def test_what_changes_after_the_publication_is_not_looked_at_again(bench: GpuBench) -> None:
    answered(bench, decode(bench, 4))
    step = decode(bench, 4)
    bench.submit(step)
    with torch.cuda.stream(bench.work):
        shape = (len(GEOMETRY.layers), 4, GEOMETRY.top_k)
        out = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=bench.device)
        bench.worker.publish(step)
        bench.work.synchronize()
        time.sleep(0.2)  # the service has copied
        executor = bench.runner._executor
        slot = executor._kernels._staging[step.plan.step % GEOMETRY.slots]  # type: ignore[attr-defined]
        slot.block_table.fill_(1 << 30)
        slot.seq_lens.fill_(2**31 - 1)
        slot.query_start.fill_(-7)
        bench.layers(step, out)
    bench.check(step, out)
    assert bench.report_of(step).fault_count == 0


def test_two_sessions_and_one_of_them_waits(engine: TritonEngine, bench: GpuBench) -> None:
    other = GpuBench(engine, gate_bound=6.0)
    try:
        waits = decode(other, 2)
        other.submit(waits)
        assert eventually(lambda: other.runner.last_step == 1)
        began = time.monotonic()
        for size in (1, 8, 64, 5):
            answered(bench, decode(bench, size))
        assert time.monotonic() - began < 4
        assert not other.reports
    finally:
        other.close()


def test_two_sessions_at_once(engine: TritonEngine, bench: GpuBench) -> None:
    other = GpuBench(engine)
    errors: list[Exception] = []

    def run(some: GpuBench) -> None:
        try:
            for _ in range(10):
                answered(some, decode(some, LENGTHS.randint(1, 64)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(some,)) for some in (bench, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    assert not errors


def test_graphs_read_the_k_caches_that_are_registered_now(bench: GpuBench) -> None:
    answered(bench, decode(bench, 4))
    with bench.runner.quiesced():
        new = {layer: cache.flip(0).contiguous() for layer, cache in bench.k_caches.items()}
        torch.cuda.current_stream().synchronize()
        for cache in bench.k_caches.values():
            cache.zero_()
        bench.worker.k_caches = bench.k_caches = new
        torch.cuda.current_stream().synchronize()
    graphs = bench.stream.graphs
    answered(bench, decode(bench, 4))
    assert eventually(lambda: bench.stream.graphs == 2 * graphs)
    answered(bench, decode(bench, 4))


class Observer(StepObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.times: list[Sequence[Sequence[int]] | None] = []

    def step_finished(
        self,
        plan: pb.StepPlan,
        report: pb.StepReport,
        times: Sequence[Sequence[int]] | None,
        layers: Sequence[int],
    ) -> None:
        self.times.append(times)


def test_stages_are_told_on_the_hosts_clock(engine: TritonEngine) -> None:
    observer = Observer()
    bench = GpuBench(engine, observer=observer)
    try:
        trace = pb.TraceContext(trace_id=bytes(range(16)), span_id=bytes(range(8)), flags=1)
        for pause in (0.0, 0.0, 1.1):  # so long that the clock is looked at again
            time.sleep(pause)
            began = time.monotonic_ns()
            step = decode(bench, 5, trace=trace)
            answered(bench, step)
            ended = time.monotonic_ns()
            assert eventually(lambda: len(observer.times) == step.plan.step)  # noqa: B023
            times = observer.times[-1]
            assert isinstance(times, StepTimes)
            assert times.clock_error is not None and 0 < times.clock_error < 1_000_000
            reached = [at for layer in times for at in layer if at]
            assert len(reached) >= 4 * len(GEOMETRY.layers)
            assert reached == sorted(reached)
            assert began - 1_000_000 < reached[0] and reached[-1] < ended + 1_000_000
        answered(bench, decode(bench, 5))
        assert eventually(lambda: len(observer.times) == 4)
        assert observer.times[-1] is None
    finally:
        bench.close()
