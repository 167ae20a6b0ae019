"""A worker's steps on a GPU beside a service's kernels: captured once, right whatever happens."""

import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from attention_worker import device_session
from attention_worker.captures import leave_captures_alone
from attention_worker.device_handoff import DeviceHandoff
from attention_worker.device_session import DeviceIndexer
from attention_worker.placements import Placement
from attention_worker.timeslice_handoff import TimesliceHandoff
from attention_worker.worker_banks import WorkerBank
from ipc_handoff.errors import RegionError
from ipc_handoff.kernels.words import WorkerState
from ipc_handoff.stages import WorkerStage
from tests.attention_worker.gpu_steps import GpuSteps, wrong
from tests.attention_worker.gpu_worker import Captured, GpuWorker, gpu_worker

pytestmark = pytest.mark.gpu

REQUESTS = 8


@pytest.fixture(scope="module")
def steps() -> GpuSteps:
    return GpuSteps(torch.device("cuda", 0))


@pytest.fixture
def worker(steps: GpuSteps) -> Iterator[GpuWorker]:
    with gpu_worker(steps) as made:
        yield made


def begin(worker: GpuWorker, case: object) -> int:
    """`begin_step`, which must not wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return worker.device_steps.begin_step(case.inputs)  # type: ignore[attr-defined]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [DeviceHandoff, TimesliceHandoff], ids=["polls", "sleeps"])
@pytest.mark.parametrize("next_n", [1, 2])
def test_one_graph_is_right_over_detachment_and_another_bank(
    steps: GpuSteps, next_n: int, kind: type[DeviceHandoff]
) -> None:
    with gpu_worker(steps, wait_bound=0.05, kind=kind) as worker:
        _one_graph(worker, steps, next_n)


def _one_graph(worker: GpuWorker, steps: GpuSteps, next_n: int) -> None:
    captured = Captured(worker.device_steps, steps, REQUESTS, next_n)
    answered = []
    service = attachment = None
    told: list[str] = []
    for number in range(1, 51):
        if number in (6, 26):
            attachment, service = worker.attach()
        if number == 20 and service is not None:
            service.is_silent = True
        case = steps.case(number, 1 + number % REQUESTS, next_n=next_n)
        begin(worker, case)
        captured.replay(case)
        told += [f"step {number}, {line}" for line in captured.wrong(case)]
        answered.append(worker.device_steps.statistics.answered_layers)
        if number == 20:
            first, silent = attachment, service
    layers = len(steps.geometry.layers)
    assert not told, told[:5]
    assert answered[4] == 0, "before there was a service"
    assert answered[18] == 14 * layers, "all of its steps"
    assert answered[24] == answered[18], "while there was none"
    assert answered[49] == answered[24] + 25 * layers, "after another one came"
    assert first is not None and silent is not None and service is not None
    assert first.detached_because == "step 20, layer 1: no progress within the bound"
    silent.close()
    service.close()


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "inline"])
def test_mixed_steps_run_eagerly(steps: GpuSteps, remote: bool) -> None:
    # Both sides launch many kernels under one lock of Python's: 20 ms would be too short here.
    with gpu_worker(steps, wait_bound=1.0) as worker:
        _mixed_steps(worker, steps, remote)


def _mixed_steps(worker: GpuWorker, steps: GpuSteps, remote: bool) -> None:
    indexer, told = worker.device_steps, []
    service = None
    for number in range(1, 14):
        if remote and number == 4:  # by then every kernel is loaded
            service = worker.attach()[1]
        case = steps.case(number, number % 4, next_n=2, prefill=(5, 1, 17)[: 1 + number % 3])
        begin(worker, case)
        found = {}
        for layer, q in case.q.items():
            q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 3))
            weights = torch.nn.functional.pad(case.weights[layer], (0, 0, 0, 3))
            out = torch.full((len(q), steps.geometry.top_k), -2, dtype=torch.int32, device="cuda")
            indexer.select(layer, q, weights, out)
            found[layer] = out
        torch.cuda.synchronize()
        told += [f"step {number}, {line}" for line in wrong(case, found)]
    assert not told, told[:5]
    layers = len(steps.geometry.layers)
    assert indexer.statistics.answered_layers == (10 * layers if remote else 0)
    if service is not None:
        service.close()


def test_an_order_of_the_host_ends_a_wait_at_once(steps: GpuSteps) -> None:
    with gpu_worker(steps, wait_bound=5.0) as worker:
        attachment, service = worker.attach()
        captured = Captured(worker.device_steps, steps, REQUESTS, 1)
        service.is_silent = True
        case = steps.case(1, REQUESTS)
        begin(worker, case)
        captured.replay(case)
        timer = threading.Timer(0.05, lambda: worker.handoff._watchdog.end(1))
        timer.start()
        began = time.monotonic()
        assert not captured.wrong(case)
        assert time.monotonic() - began < 1.0
        timer.join()
        begin(worker, case)
        assert attachment.detached_because.endswith("was ended while it waited")
        torch.cuda.synchronize()
        service.close()


def test_a_replay_without_a_step_is_inline_and_takes_nothing(
    worker: GpuWorker, steps: GpuSteps
) -> None:
    attachment, service = worker.attach()
    captured = Captured(worker.device_steps, steps, REQUESTS, 1)
    case = steps.case(3, REQUESTS)
    begin(worker, case)
    captured.replay(case)
    assert not captured.wrong(case)
    answered = worker.device_steps.statistics.answered_layers
    assert answered == len(steps.geometry.layers)
    captured.replay(case)
    assert not captured.wrong(case)
    assert worker.device_steps.statistics.answered_layers == answered
    assert int(worker.handoff._memory.state[WorkerState.ARMED]) == 0
    assert not attachment.detached_because
    service.close()


def test_stamps_are_read_after_the_step_and_counted_when_overwritten(
    worker: GpuWorker, steps: GpuSteps
) -> None:
    _, service = worker.attach()
    captured = Captured(worker.device_steps, steps, REQUESTS, 1)
    case = steps.case(5, REQUESTS)
    first = begin(worker, case)
    captured.replay(case)
    assert not captured.wrong(case)
    times = worker.device_steps.stamps(first)
    assert times is not None
    order = (
        WorkerStage.STAGE_BEGUN, WorkerStage.REQUEST_RUNG, WorkerStage.WAIT_ENDED,
        WorkerStage.HANDED_BACK,
    )  # fmt: skip
    told = [stamps[stage] for stamps in times for stage in order]
    assert all(told) and told == sorted(told)
    for _ in range(64):
        begin(worker, case)
        captured.replay(case)
    torch.cuda.synchronize()
    assert worker.device_steps.stamps(first) is None
    assert worker.device_steps.statistics.lost_stamps == 1
    service.close()


def test_a_thread_that_says_so_makes_banks_beside_a_capture(
    worker: GpuWorker, steps: GpuSteps
) -> None:
    errors: list[BaseException] = []

    def make() -> None:
        try:
            leave_captures_alone()
            WorkerBank(steps.geometry, 9, 0, 0).start(1)
        except BaseException as error:
            errors.append(error)

    worker.device_steps.begin_inline(REQUESTS)
    captured = Captured(worker.device_steps, steps, REQUESTS, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured._forward()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    assert not errors
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("why", ["CUDA_LAUNCH_BLOCKING: ", "k_cache/1: "])
def test_a_worker_that_cannot_share_works_inline_and_says_why(
    steps: GpuSteps, monkeypatch: pytest.MonkeyPatch, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if why.startswith("CUDA"):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    else:
        # As of memory under expandable_segments, which tests/ipc_handoff has.
        error = RegionError("k_cache/1: expandable_segments (fix: another setting)")
        monkeypatch.setattr(device_session.cuda_runtime, "runs_under_mps", lambda device: True)
        monkeypatch.setattr(device_session.SharedTensor, "of_cuda", Mock(side_effect=error))
    device = torch.device("cuda", 0)
    with DeviceIndexer(steps.geometry, steps.k_caches, device=device) as indexer:
        assert indexer.placement is Placement.INLINE
        assert str(indexer.last_error).startswith(why)
        assert "(fix: " in str(indexer.last_error)
        case = steps.case(1, 3)
        for _ in range(2):
            indexer.begin_step(case.inputs)
            found = {}
            for layer, q in case.q.items():
                found[layer] = torch.full_like(case.expected[layer], -2)
                indexer.select(layer, q, case.weights[layer], found[layer])
            torch.cuda.synchronize()
            assert not wrong(case, found)
    assert sum("working inline" in record.message for record in caplog.records) == 1
