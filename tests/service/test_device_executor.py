"""Steps in flight: in what order they are begun and reported, how many, and how they end.

The GPU is a fake: launches are recorded, and are done when the test says so.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.attachment import Attachment
from indexer_service.device_executor import DeviceExecutor
from indexer_service.device_stream import told_when_lost
from indexer_service.engine import EngineSettings
from indexer_service.engines.triton import TritonEngine
from indexer_service.executor import DeviceLost, StepCancelled
from indexer_service.plan_queue import PlanQueue
from indexer_service.runner import RunnerSettings, StepRunner
from indexer_service.session_regions import DeviceViews
from indexer_service.step_graphs import buckets
from indexer_service.step_kernels import STEP_WORDS, StepKernels, StepShape
from ipc_handoff.kernels.words import GateEnd
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.ring import RingConsumer
from ipc_handoff.wakeups import Wakeup
from tests.service.fake_stream import FakeStream
from tests.service.hand_worker import EPOCH, HandWorker
from tests.support.waiting import eventually

GEOMETRY = HandoffGeometry(
    layers=(3, 7), heads=16, head_dim=64, top_k=24, page_size=64, max_rows=48, max_requests=6,
    max_context=384, slots=3,
)  # fmt: skip
CPU = torch.device("cpu")


class Engine(TritonEngine):
    """Prepares one row a request at once; more when the test says so."""

    def __init__(self) -> None:
        super().__init__(EngineSettings(1 << 20, 1, CPU))
        self.may_prepare = threading.Event()
        self.stopped, self.tries = 0, 0
        self.breaks: Exception | None = None

    def prepare(
        self, geometry: Any, caches: Any, rows_per_decode: int, is_closing: Callable[[], bool]
    ) -> None:
        while rows_per_decode > 1 and not self.may_prepare.wait(0.01):
            if is_closing():
                self.stopped += 1
                raise StepCancelled("closing")
        if rows_per_decode > 1:
            self.tries += 1
            if self.breaks is not None:
                raise self.breaks


class Bench:
    """A runner with a fake GPU, and what it reported, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[int, StepShape]] = []
        self.fails: Exception | None = None
        self.given_up: list[int] = []
        bench = self

        def launch(kernels: StepKernels, shape: StepShape, caches: Any, *_: Any) -> None:
            if bench.fails is not None:
                raise bench.fails
            step = int(kernels.plan[:STEP_WORDS].view(torch.int64))
            bench.launches.append((step, shape))
            kernels.result[:3] = torch.tensor([1, 1, len(shape.ordinals)], dtype=torch.int32)

        monkeypatch.setattr(StepKernels, "launch", launch)
        monkeypatch.setattr(StepKernels, "give_up", lambda _, step: self.given_up.append(step))
        self.worker = worker = HandWorker(GEOMETRY, CPU)
        self.stream = FakeStream(CPU)
        self.engine = Engine()
        self.lost = threading.Event()
        self.k_caches: dict[int, torch.Tensor] = worker.k_caches
        bank = DeviceViews(worker.staging, worker.answers)
        attachment = Attachment(
            epoch=EPOCH, geometry=GEOMETRY, control=worker.service_control(), bank=bank,
            k_cache=lambda layer: self.k_caches.get(layer), wake_service=Wakeup(),
            wake_worker=Wakeup(),
        )  # fmt: skip
        make = partial(
            DeviceExecutor, attachment, bank, self.engine, 1.0, False,
            make_stream=lambda device: self.stream,  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        self.runner = StepRunner(
            attachment, make, RunnerSettings(1.0, 16), use_ring=True,
            on_device_lost=self.lost.set,
        )  # fmt: skip
        self.reports: list[pb.StepReport] = []
        self.runner.start()
        assert self.runner.wait_until_ready(10)
        self.graphs = len(buckets(1, GEOMETRY)) * GEOMETRY.slots
        assert self.stream.captured == self.graphs
        assert [step for step, _ in self.launches] == [0]  # what made the kernels
        self.launches.clear()

    def submit(self, **plan: Any) -> int:
        step = self.worker.make([1, 1], [100, 50], **plan)
        self.runner.submit(step.plan, self.reports.append)
        return int(step.plan.step)

    def reported(self, *steps: int) -> list[str]:
        """Waits until exactly these are reported; their statuses."""
        assert eventually(lambda: len(self.reports) >= len(steps))
        assert [report.step for report in self.reports] == list(steps)
        return [pb.StepStatus.Name(report.status)[12:] for report in self.reports]

    def begun(self, *steps: int) -> None:
        """Waits until exactly these are launched."""
        assert eventually(lambda: len(self.launches) >= len(steps))
        self.settle()
        assert [step for step, _ in self.launches] == list(steps)

    def settle(self) -> None:
        """The runner has looked around, and done what it would do."""
        threading.Event().wait(0.05)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.stream.error = None
    made.runner.close()


def test_steps_begin_while_others_are_in_flight_and_are_reported_when_they_end(
    bench: Bench,
) -> None:
    bench.stream.holds = True
    assert [bench.submit(), bench.submit()] == [1, 2]
    bench.begun(1, 2)
    assert not bench.reports
    bench.stream.release()
    assert bench.reported(1) == ["ANSWERED"]
    bench.stream.release()
    assert bench.reported(1, 2) == ["ANSWERED", "ANSWERED"]
    assert list(bench.reports[1].answered_layers) == [3, 7]
    assert bench.stream.launched == 2
    assert bench.runner.answered_steps == 2


def test_no_more_steps_are_in_flight_than_have_slots_and_no_slot_is_used_twice(
    bench: Bench,
) -> None:
    bench.stream.holds = True
    for _ in range(5):
        bench.submit()
    bench.begun(1, 2, 3)
    plans = bench.stream.memory[::3]
    assert [int(plan[:STEP_WORDS].view(torch.int64)) for plan in plans] == [1, 2, 3]
    bench.stream.release()
    bench.begun(1, 2, 3, 4)
    assert [int(plan[:STEP_WORDS].view(torch.int64)) for plan in plans] == [4, 2, 3]
    bench.stream.release(3)
    bench.begun(1, 2, 3, 4, 5)
    bench.stream.release()
    assert set(bench.reported(1, 2, 3, 4, 5)) == {"ANSWERED"}


def test_a_refused_plan_is_reported_behind_the_steps_before_it(bench: Bench) -> None:
    bench.stream.holds = True
    bench.submit()
    refused = bench.worker.make([1, 3], [9, 9], decode=1).plan
    del refused.exact.query_start[:]
    bench.runner.submit(refused, bench.reports.append)
    assert eventually(lambda: bool(bench.given_up))
    assert bench.given_up == [2]
    assert not bench.reports
    bench.stream.release()
    assert bench.reported(1, 2) == ["ANSWERED", "REJECTED"]
    assert bench.reports[1].message.startswith("plan.exact.query_start: ")


def test_closing_ends_what_is_in_flight_and_then_says_drained(bench: Bench) -> None:
    bench.stream.holds = True
    bench.submit()
    bench.begun(1)
    seen: list[tuple[bool, int]] = []
    kernels = bench.runner._executor._kernels  # type: ignore[attr-defined]

    def gates_end() -> None:
        seen.append((bench.worker.control.bells.is_drained(), int(kernels.closing)))
        for memory in bench.stream.memory:
            memory[:3] = torch.tensor([0, int(GateEnd.CLOSING), 0])

    bench.stream.on_synchronize = gates_end
    assert bench.runner.close() == 1
    assert seen[0] == (False, 1)
    assert bench.reported(1) == ["CANCELLED"]
    assert bench.reports[0].message == "the session is closing"
    assert bench.worker.control.bells.is_drained()
    assert bench.stream.is_closed


def test_closing_gives_up_the_plans_that_wait_in_the_ring(bench: Bench) -> None:
    """Their worker would wait for its whole bound otherwise."""
    bench.stream.holds = True
    for _ in range(GEOMETRY.slots):
        bench.submit()
    bench.begun(1, 2, 3)
    for _ in range(2):
        plan = bench.worker.make([1, 1], [100, 50]).plan
        bench.worker.control.plans.post(plan.SerializeToString())
    bench.worker.control.plans.post(b"no plan")
    bench.settle()

    def gates_end() -> None:
        for memory in bench.stream.memory:
            memory[:3] = torch.tensor([0, int(GateEnd.CLOSING), 0])

    bench.stream.on_synchronize = gates_end
    assert bench.runner.close() == 5
    assert bench.given_up[-1] == 5
    told = [pb.StepReport.FromString(report) for report in all_of(bench.worker.control.reports)]
    assert [report.step for report in told] == [4, 5]
    assert {report.status for report in told} == {pb.STEP_STATUS_CANCELLED}
    assert {report.message for report in told} == {"the session is closing"}


def all_of(ring: RingConsumer) -> list[bytes]:
    return list(iter(ring.take, None))


def test_a_worker_that_goes_on_posting_cannot_hold_up_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, post = bench.worker.control.plans, PlanQueue._parse

    def parse(queue: PlanQueue, payload: bytes) -> pb.StepPlan | None:
        plans.post(payload)
        return post(queue, payload)

    bench.stream.holds = True
    for _ in range(GEOMETRY.slots):
        bench.submit()
    bench.begun(1, 2, 3)
    monkeypatch.setattr(PlanQueue, "_parse", parse)
    plans.post(bench.worker.make([1, 1], [100, 50]).plan.SerializeToString())
    closing = threading.Thread(target=bench.runner.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_a_close_that_finishes_answers_what_has_arrived(bench: Bench) -> None:
    bench.stream.holds = True
    for _ in range(5):
        bench.submit()
    bench.begun(1, 2, 3)
    closing = threading.Thread(target=partial(bench.runner.close, finish=True))
    closing.start()
    for _ in range(5):
        assert eventually(lambda: bool(bench.stream.marks))
        bench.stream.release()
    closing.join(10)
    assert set(bench.reported(1, 2, 3, 4, 5)) == {"ANSWERED"}


def test_a_worker_that_detaches_gets_drained_with_a_step_in_flight(bench: Bench) -> None:
    bench.stream.holds = True
    bench.submit()
    bench.begun(1)
    bench.worker.control.bells.detach()
    assert eventually(bench.worker.control.bells.is_drained)
    bench.reported(1)
    assert bench.stream.is_closed


def test_regions_change_between_steps_and_graphs_are_made_anew(bench: Bench) -> None:
    bench.stream.holds = True
    bench.submit()
    bench.begun(1)
    inside, leave = threading.Event(), threading.Event()

    def change() -> None:
        with bench.runner.quiesced():
            inside.set()
            leave.wait(10)
            bench.k_caches = dict(bench.k_caches)

    thread = threading.Thread(target=change)
    thread.start()
    bench.submit()
    bench.settle()
    assert not inside.is_set()
    assert [step for step, _ in bench.launches] == [1]
    bench.stream.release()
    assert inside.wait(10)
    bench.settle()
    assert [step for step, _ in bench.launches] == [1]
    bench.stream.holds = False
    leave.set()
    thread.join(10)
    bench.reported(1, 2)
    assert eventually(lambda: bench.stream.captured == 2 * bench.graphs)


def test_a_launch_that_fails_is_reported_and_the_next_step_is_answered(bench: Bench) -> None:
    bench.fails = ValueError("a bug")
    bench.submit()
    assert bench.reported(1) == ["FAILED"]
    assert bench.reports[0].message == "engine: a bug"
    assert bench.given_up == [1]
    bench.fails = None
    for _ in range(GEOMETRY.slots + 1):
        bench.submit()
    assert bench.reported(1, 2, 3, 4, 5)[1:] == ["ANSWERED"] * 4


def test_a_lost_gpu_ends_the_session_and_is_told(bench: Bench) -> None:
    bench.stream.holds = True
    bench.submit()
    bench.begun(1)
    bench.stream.error = torch.AcceleratorError("CUDA error: an illegal memory access")
    assert bench.lost.wait(10)
    assert bench.reported(1) == ["FAILED"]
    assert "illegal memory access" in bench.reports[0].message
    assert eventually(lambda: bench.runner.ended)
    assert bench.worker.control.bells.is_drained()
    assert not bench.stream.is_closed


def test_launches_whose_end_fails_too_keep_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fails = ValueError("a bug")
    with monkeypatch.context() as patch:
        patch.setattr(StepKernels, "give_up", _fail)
        steps = [bench.submit() for _ in range(GEOMETRY.slots + 1)]
        assert set(bench.reported(*steps)) == {"FAILED"}
    assert {report.message for report in bench.reports} == {"engine: another bug"}
    bench.fails = None
    steps.append(bench.submit())
    assert bench.reported(*steps)[-1] == "ANSWERED"


def test_a_gpu_that_is_lost_while_a_launch_is_given_up_is_told(bench: Bench) -> None:
    bench.fails = ValueError("a bug")
    bench.stream.error = torch.AcceleratorError("CUDA error: an illegal memory access")
    bench.submit()
    assert bench.lost.wait(10)
    assert bench.reported(1) == ["FAILED"]
    assert eventually(bench.worker.control.bells.is_drained)


def _fail(*_: Any) -> None:
    raise ValueError("another bug")


def test_drained_is_said_also_when_closing_fails(bench: Bench) -> None:
    bench.stream.on_synchronize = _fail
    bench.runner.close()
    assert bench.worker.control.bells.is_drained()


def test_a_gpu_that_is_lost_at_the_very_end_is_told(bench: Bench) -> None:
    ends = [lambda: None, bench.stream.check]

    def synchronize() -> None:
        bench.stream.error = torch.AcceleratorError("CUDA error: unspecified launch failure")
        ends.pop(0)()

    bench.stream.on_synchronize = synchronize
    bench.runner.close()
    assert bench.lost.is_set()
    assert bench.worker.control.bells.is_drained()
    assert not bench.stream.is_closed


def test_kernels_that_cannot_be_made_are_not_tried_again_before_regions_change(
    bench: Bench,
) -> None:
    def submit() -> None:
        bench.runner.submit(bench.worker.make([2, 2], [100, 50]).plan, bench.reports.append)

    bench.engine.breaks = RuntimeError("out of memory")
    bench.engine.may_prepare.set()
    submit()
    bench.reported(1)
    assert "are being made" in bench.reports[0].message
    preparation = bench.runner._executor._preparation  # type: ignore[attr-defined]
    assert eventually(lambda: preparation._thread is None)
    submit()
    submit()
    assert bench.reported(1, 2, 3) == ["CANCELLED"] * 3
    why = "kernels for rows_per_decode 2 could not be made: out of memory"
    assert [report.message for report in bench.reports[1:]] == [why, why]
    assert bench.engine.tries == 1
    assert bench.submit() == 4  # others go on
    assert bench.reported(1, 2, 3, 4)[3] == "ANSWERED"
    bench.engine.breaks = None
    with bench.runner.quiesced():
        pass
    assert eventually(lambda: bench.stream.captured == 2 * bench.graphs)
    submit()
    assert eventually(lambda: bench.engine.tries == 2)


def test_a_gpu_that_is_lost_while_kernels_are_made_is_told(bench: Bench) -> None:
    bench.engine.breaks = DeviceLost("an illegal memory access")
    bench.engine.may_prepare.set()
    bench.runner.submit(bench.worker.make([2, 2], [100, 50]).plan, bench.reports.append)
    assert bench.lost.wait(10)
    assert eventually(lambda: bench.runner.ended)
    assert bench.worker.control.bells.is_drained()


def test_steps_whose_kernels_are_not_made_yet_are_given_up_at_once(bench: Bench) -> None:
    def submit() -> None:
        plan = bench.worker.make([2, 2], [100, 50]).plan
        bench.runner.submit(plan, bench.reports.append)

    submit()
    submit()
    assert bench.reported(1, 2) == ["CANCELLED", "CANCELLED"]
    assert bench.given_up == [1, 2]
    assert bench.submit() == 3  # others go on
    assert bench.reported(1, 2, 3)[2] == "ANSWERED"
    bench.engine.may_prepare.set()
    assert eventually(lambda: bench.stream.captured == 2 * bench.graphs)
    launched = bench.stream.launched
    submit()
    assert bench.reported(1, 2, 3, 4)[3] == "ANSWERED"
    assert bench.stream.launched == launched + 1


@pytest.mark.parametrize("how", ["close", "regions change"])
def test_what_is_made_aside_is_broken_off(bench: Bench, how: str) -> None:
    bench.runner.submit(bench.worker.make([2, 2], [100, 50]).plan, bench.reports.append)
    bench.reported(1)
    if how == "close":
        bench.runner.close()
    else:
        with bench.runner.quiesced():
            pass
    assert bench.engine.stopped == 1


@pytest.mark.parametrize("works", [True, False])
def test_only_an_error_behind_which_its_own_gpu_does_not_work_loses_it(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from a thread whose current device is another one, and is well or lost the other way."""
    device = torch.device("cuda", 1)

    def look(asked: torch.device | None = None) -> tuple[int, int]:
        if (asked == device) == works:
            return 0, 0
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    expected = RuntimeError if works else DeviceLost
    with pytest.raises(expected, match=r"^out of memory$"), told_when_lost(device):
        raise RuntimeError("out of memory\nand more" if not works else "out of memory")
