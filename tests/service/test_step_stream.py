"""RunSteps: reports in order, refusals that do not end it, and clients that stop reading."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_service.sessions import Session
from indexer_service.settings import Settings
from ipc_handoff.descriptors import WAKE_SERVICE_TOKEN
from tests.service.support import Worker, refused, running
from tests.support.waiting import SOON, eventually

MakeWorker = Callable[..., Worker]
FAILED = grpc.StatusCode.FAILED_PRECONDITION


class Stream:
    """One RunSteps call whose plans are sent one by one."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._plans: queue.Queue[pb.StepPlan | None] = queue.Queue()
        self.call = worker.stub.RunSteps(self._requests(), timeout=2 * SOON)

    def _requests(self) -> Iterator[pb.RunStepsRequest]:
        session_id = self.worker.id
        while (plan := self._plans.get()) is not None:
            yield pb.RunStepsRequest(session_id=session_id, plan=plan)
            session_id = ""

    def send(self, plan: pb.StepPlan) -> None:
        self._plans.put(plan)

    def finish(self) -> None:
        self._plans.put(None)

    def report(self) -> pb.StepReport:
        return next(self.call).report


@pytest.fixture
def stream(worker: Worker) -> Iterator[Stream]:
    stream = Stream(worker)
    yield stream
    stream.finish()
    stream.call.cancel()


def test_steps_are_answered_over_one_stream(stream: Stream) -> None:
    worker = stream.worker
    for _ in range(5):
        plan = worker.plan()
        stream.send(plan)
        length = worker.stage(plan)
        report = stream.report()
        assert (report.step, report.status) == (plan.step, pb.STEP_STATUS_ANSWERED)
        assert worker.answer(plan)[:length] == list(range(length))


def test_all_reports_come_after_the_client_has_sent_its_last(stream: Stream) -> None:
    plans = [stream.worker.plan(layers=[99]) for _ in range(20)]
    for plan in plans:
        stream.send(plan)
    stream.finish()
    reports = [response.report for response in stream.call]
    assert [report.step for report in reports] == [plan.step for plan in plans]
    assert stream.call.code() == grpc.StatusCode.OK


def test_a_refused_plan_is_reported_and_the_stream_goes_on(stream: Stream) -> None:
    worker = stream.worker
    stream.send(worker.plan(rows=9))
    report = stream.report()
    assert report.status == pb.STEP_STATUS_REJECTED
    assert report.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert report.message.startswith("plan.rows: ") and "(fix: " in report.message
    plan = worker.plan()
    stream.send(plan)
    worker.stage(plan)
    assert stream.report().status == pb.STEP_STATUS_ANSWERED


def test_a_plan_before_the_regions_is_reported(make_worker: MakeWorker) -> None:
    stream = Stream(make_worker())
    stream.send(stream.worker.plan())
    report = stream.report()
    assert report.code == FAILED.value[0]
    assert report.message.startswith("regions: 'control', 'staging', 'answers'")
    stream.worker.attach()
    plan = stream.worker.plan()
    stream.send(plan)
    stream.worker.stage(plan)
    assert stream.report().status == pb.STEP_STATUS_ANSWERED
    stream.finish()


def test_a_gate_that_ends_is_reported_and_the_next_step_is_answered(settings: Settings) -> None:
    with running(settings.model_copy(update={"gate_bound_seconds": 0.3})) as service:
        worker = Worker(service).attach()
        stream = Stream(worker)
        stream.send(worker.plan())
        report = stream.report()
        assert report.status == pb.STEP_STATUS_CANCELLED
        assert "gate" in report.message
        plan = worker.plan()
        worker.stage(plan)
        stream.send(plan)
        assert stream.report().status == pb.STEP_STATUS_ANSWERED
        stream.finish()
        worker.leave()


def test_an_old_epoch_ends_the_stream_and_not_the_session(stream: Stream) -> None:
    stream.send(stream.worker.plan(epoch=3))
    with refused(FAILED, "plan.epoch", "3", str(stream.worker.epoch)):
        stream.report()
    assert stream.worker.works()


def test_a_message_without_a_plan_ends_the_stream(worker: Worker) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "plan", "missing"):
        list(worker.stub.RunSteps(iter([pb.RunStepsRequest(session_id=worker.id)])))


def test_two_sessions_in_one_stream_are_refused(make_worker: MakeWorker) -> None:
    one, two = make_worker().attach(), make_worker().attach()
    requests = [
        pb.RunStepsRequest(session_id=one.id, plan=one.plan(layers=[99])),
        pb.RunStepsRequest(session_id=two.id, plan=two.plan()),
    ]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "session_id", "one stream a session"):
        list(one.stub.RunSteps(iter(requests)))
    assert one.works() and two.works()


def test_closing_the_session_reports_its_steps_and_ends_the_stream(stream: Stream) -> None:
    plans = [stream.worker.plan() for _ in range(3)]
    for plan in plans:
        stream.send(plan)
    assert eventually(lambda: stream.worker.service.status().sessions[-1].queued_steps == 2)
    assert stream.worker.close() == 3
    reports = [stream.report() for _ in plans]
    assert [report.step for report in reports] == [plan.step for plan in plans]
    assert {report.status for report in reports} == {pb.STEP_STATUS_CANCELLED}
    with refused(grpc.StatusCode.NOT_FOUND, "session_id", "closed"):
        stream.report()


def test_replacing_the_session_ends_an_idle_stream(make_worker: MakeWorker) -> None:
    stream = Stream(make_worker(instance="idle").attach())
    stream.send(stream.worker.plan(layers=[99]))
    stream.report()
    successor = make_worker(instance="idle")
    with refused(FAILED, "epoch", str(successor.epoch)):
        stream.report()
    stream.finish()


def test_more_plans_than_may_wait_are_refused_each(settings: Settings) -> None:
    with running(settings.model_copy(update={"queued_steps": 2})) as service:
        worker = Worker(service).attach()
        stream = Stream(worker)
        for _ in range(6):
            stream.send(worker.plan())
        codes = [stream.report().code for _ in range(3)]
        # None of them waits for its gate any longer.
        worker.bank.control.bells.publish(worker.step + 1)
        worker.wakeups[WAKE_SERVICE_TOKEN].ring()
        stream.finish()
        codes += [response.report.code for response in stream.call]
        refusals = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert len(codes) == 6
        assert 3 <= refusals <= 4
        worker.leave()


def test_a_client_that_goes_away_leaves_its_session_working(stream: Stream) -> None:
    stream.send(stream.worker.plan())
    stream.call.cancel()
    time.sleep(0.1)
    assert eventually(stream.worker.works)


def test_a_client_that_stops_reading_loses_its_stream_only(
    settings: Settings, unread: threading.Event
) -> None:
    with running(settings.model_copy(update={"report_write_seconds": 0.5})) as service:
        worker, other = Worker(service).attach(), Worker(service).attach()

        def requests() -> Iterator[pb.RunStepsRequest]:
            # Refused plans: a report of some hundred bytes each.
            while not unread.is_set():
                yield pb.RunStepsRequest(session_id=worker.id, plan=worker.plan(layers=[99]))

        # Without its probe, gRPC takes in 64 KiB that nobody reads, not megabytes.
        channel = service.channel(None, ("grpc.http2.bdp_probe", 0))
        call = rpc.IndexerServiceStub(channel).RunSteps(requests())
        assert eventually(lambda: other.works() and unread.is_set())
        # The end of the stream stands behind the unread reports.
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "stream", "not read"):
            for _ in call:
                pass
        assert worker.works()
        worker.leave()
        other.leave()


def test_a_stream_whose_first_report_cannot_be_sent_ends(settings: Settings) -> None:
    with running(settings.model_copy(update={"report_write_seconds": 1e-9})) as service:
        worker = Worker(service).attach()
        stream = Stream(worker)
        stream.send(worker.plan(layers=[99]))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "stream", "not read"):
            for _ in range(2):
                stream.report()
        stream.finish()
        worker.leave()


def test_a_client_that_reads_is_never_said_not_to(settings: Settings) -> None:
    """The end of a stream is no report: it needs no room among them."""
    with running(settings.model_copy(update={"unread_reports": 1})) as service:
        worker = Worker(service).attach()
        for _ in range(10):
            stream = Stream(worker)
            plan = worker.plan()
            stream.send(plan)
            stream.finish()
            worker.stage(plan)
            statuses = [response.report.status for response in stream.call]
            assert statuses == [pb.STEP_STATUS_ANSWERED]
            assert stream.call.code() == grpc.StatusCode.OK
        worker.leave()


def test_a_fault_while_reading_ends_the_stream_only(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(Session, "submit", fail)
        stream.send(stream.worker.plan())
        with refused(grpc.StatusCode.INTERNAL, "service"):
            stream.report()
    assert "secret detail" in caplog.text
    assert stream.worker.works()


def test_a_stream_whose_first_plan_does_not_come_ends(settings: Settings) -> None:
    with running(settings.model_copy(update={"first_plan_seconds": 0.3})) as service:
        worker = Worker(service).attach()
        stream = Stream(worker)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "stream", "0.3 s"):
            stream.report()
        stream.finish()
        worker.leave()


def test_behind_the_first_plan_a_stream_may_be_silent(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, timeout = 1234.5, asyncio.timeout
    bounds: list[asyncio.Timeout] = []

    def noted(wanted: float) -> asyncio.Timeout:
        made = timeout(wanted)
        if wanted == seconds:
            bounds.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", noted)
    with running(settings.model_copy(update={"first_plan_seconds": seconds})) as service:
        worker = Worker(service).attach()
        stream = Stream(worker)
        assert eventually(lambda: bool(bounds))
        assert bounds[0].when() is not None
        stream.send(worker.plan(layers=[99]))
        assert stream.report().status == pb.STEP_STATUS_REJECTED
        assert bounds[0].when() is None
        stream.finish()
        worker.leave()


def test_reports_that_nobody_takes_are_bounded(settings: Settings, unread: threading.Event) -> None:
    """The runner goes on while a stream is stuck; what it reports must not pile up."""
    bounds = {"unread_reports": 8, "report_write_seconds": 600.0, "gate_bound_seconds": 0.001}
    with running(settings.model_copy(update=bounds)) as service:
        worker = Worker(service).attach()
        channel = service.channel(None, ("grpc.http2.bdp_probe", 0))

        def requests() -> Iterator[pb.RunStepsRequest]:
            while not unread.wait(0.001):
                yield pb.RunStepsRequest(session_id=worker.id, plan=worker.plan())

        call = rpc.IndexerServiceStub(channel).RunSteps(requests())
        assert unread.wait(SOON)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "stream", "not read"):
            for _ in call:
                pass
        worker.leave()
