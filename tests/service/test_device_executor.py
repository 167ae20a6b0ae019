"""Steps in flight: in what order they are begun and reported, how many, and how they end.

The GPU is a fake: launches are recorded, and are done when the test says so.
"""

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.plan_queue import PlanQueue
from indexer_service.step_kernels import STEP_WORDS
from ipc_handoff.kernels.words import GateEnd
from ipc_handoff.ring import RingConsumer
from tests.service.fake_gpu_bench import GEOMETRY, Bench
from tests.support.waiting import SOON, eventually


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
        bench.gates_end(GateEnd.CLOSING)

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
        bench.gates_end(GateEnd.CLOSING)

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
    closing.join(SOON)
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
    closing.join(SOON)
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
            leave.wait(SOON)
            bench.k_caches = dict(bench.k_caches)

    thread = threading.Thread(target=change)
    thread.start()
    bench.submit()
    bench.settle()
    assert not inside.is_set()
    assert [step for step, _ in bench.launches] == [1]
    bench.stream.release()
    assert inside.wait(SOON)
    bench.settle()
    assert [step for step, _ in bench.launches] == [1]
    bench.stream.holds = False
    leave.set()
    thread.join(SOON)
    bench.reported(1, 2)
    assert eventually(lambda: bench.stream.captured == 2 * bench.graphs)
