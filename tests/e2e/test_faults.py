"""Sessions, steps and rings that end in the middle: the engine goes on, right and in time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_client import Session, Source, session
from indexer_client.attachment import Attachment
from ipc_handoff.layout import RING_CAPACITY
from tests.e2e.conftest import Start
from tests.service.support import running as service_running
from tests.support.plants import Pair, Settings, pair
from tests.support.runs import running as in_this_process
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Case, RandomSteps, Shape

Patch = pytest.MonkeyPatch
PATIENT = 2 * SOON


def _attachment(running: Pair) -> Attachment:
    found = running.session._attachment
    assert found is not None
    return found


def _checked(running: Pair, case: Case, between: Callable[[int], None]) -> list[Source]:
    """One step; `between` is called before each layer with its place."""
    running.checker.sources.append([])
    with running.session.step(case.inputs, case.layers) as step:
        for place, layer in enumerate(case.layers):
            between(place)
            source, out = running.ask(step, case, layer)
            running.checker.check(step.number, layer, out, case, source)
    return running.checker.last


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_worker_that_pauses_for_longer_than_the_gate_computes_the_rest_itself(
    place: int, tmp_path: Path
) -> None:
    with pair(tmp_path) as running:
        running.step()
        sources = _checked(
            running, running.case(), lambda at: running.pause() if at == place else None
        )
        assert sources == [Source.SERVICE] * place + [Source.INLINE] * (3 - place)
        report = running.reports.of(2)
        assert report.status == pb.STEP_STATUS_CANCELLED
        assert list(report.answered_layers) == list(running.steps.shape.layers[:place])
        # The service was well all the time: nobody detached.
        assert set(running.step()) == {Source.SERVICE}
        assert running.session.statistics.cancelled_steps == 1
        assert running.session.statistics.detachments == 0
        running.checker.assert_right()


def test_a_worker_that_pauses_between_steps_for_longer_than_a_gate_loses_nothing(
    tmp_path: Path,
) -> None:
    with pair(tmp_path) as running:
        for _ in range(2):
            assert set(running.step()) == {Source.SERVICE}
            with running.hurried_gates():
                time.sleep(0.1)
        running.checker.assert_right()


def test_a_full_plan_ring_detaches_and_never_blocks(tmp_path: Path) -> None:
    """The service is held in a step while the worker begins more steps than the ring holds."""
    with pair(tmp_path) as running:
        running.step()
        running.engine.hold()
        case = running.case()
        for begun in range(RING_CAPACITY + 2):
            with running.session.step(case.inputs, case.layers) as step:
                if begun == 0:
                    query = case.queries[case.layers[0]]
                    step.stage(case.layers[0], query.q, query.weights)
                    assert running.engine.waiting.wait(SOON)
        assert running.session.statistics.detachments == 1
        assert set(running.step()) == {Source.INLINE}
        # All of it while the service did nothing.
        assert running.engine.ended == 0
        running.engine.release()
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_an_engine_that_fails_is_told_whatever_became_of_its_inputs(tmp_path: Path) -> None:
    """That a newer layer was staged over them may be why; it is no reason to hide the error."""
    with pair(tmp_path) as running:
        running.step()
        running.engine.hold()
        case = running.case()
        layer = case.layers[0]
        with running.session.step(case.inputs, case.layers) as step:
            query = case.queries[layer]
            step.stage(layer, query.q, query.weights)
            assert running.engine.waiting.wait(SOON)
            attachment = running.session._attachment
            assert attachment is not None
            attachment.bank.control.generations.layers.begin(step.number, 1)
            running.engine.fail = True
            running.engine.release()
            report = running.reports.of(step.number)
    assert (report.status, report.message) == (pb.STEP_STATUS_FAILED, "engine: planted")


def test_an_engine_that_fails_costs_its_step_only(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        running.step()
        running.engine.fail = True
        assert set(running.step()) == {Source.INLINE}
        running.engine.fail = False
        assert set(running.step()) == {Source.SERVICE}
        report = running.reports.of(2)
        assert (report.status, report.code) == (
            pb.STEP_STATUS_FAILED,
            grpc.StatusCode.INTERNAL.value[0],
        )
        assert "planted" in report.message
        assert running.session.statistics.detachments == 0
        running.checker.assert_right()


@pytest.mark.parametrize("place", [0, 1])
def test_close_session_ends_a_step_behind_its_gate(place: int, tmp_path: Path) -> None:
    bounds = {"wait_bound_seconds": PATIENT}
    with pair(tmp_path, gate_bound_seconds=PATIENT, client=bounds) as running:
        running.step()
        attachment = _attachment(running)
        cancelled: list[int] = []

        def close(at: int) -> None:
            if at == place:
                request = pb.CloseSessionRequest(
                    session_id=attachment.session_id, epoch=attachment.epoch
                )
                reply = attachment.control_plane.close_session(request)
                cancelled.append(reply.cancelled_steps)

        began = time.monotonic()
        sources = _checked(running, running.case(), close)
        assert time.monotonic() - began < SOON
        assert cancelled == [1]
        assert sources == [Source.SERVICE] * place + [Source.INLINE] * (3 - place)
        running.step()
        assert eventually(lambda: running.session.statistics.attachments == 2)
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def _end_lease(running: Pair) -> None:
    """As if the worker had been silent for so long; returns when the service has let go."""
    table = running.service.service._table
    assert table is not None
    table.sessions[0]._deadline = 0.0
    assert eventually(_attachment(running).bells.is_drained)


def test_a_lease_that_runs_out_behind_a_gate_ends_the_step(tmp_path: Path) -> None:
    with pair(tmp_path, gate_bound_seconds=PATIENT) as running:
        running.step()
        sources = _checked(
            running, running.case(), lambda at: _end_lease(running) if at == 1 else None
        )
        assert sources == [Source.SERVICE, Source.INLINE, Source.INLINE]
        running.step()
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_a_drained_attachment_is_left_at_once_and_not_after_a_bound(tmp_path: Path) -> None:
    """The lease ran out between steps; the service has said that it is gone."""
    with pair(tmp_path, client={"wait_bound_seconds": PATIENT}) as running:
        running.step()
        _end_lease(running)
        began = time.monotonic()
        assert set(running.step()) == {Source.INLINE}
        assert time.monotonic() - began < SOON
        assert running.session.statistics.detachments == 1
        running.session.wait_attached(SOON)
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_a_second_session_of_the_same_worker_replaces_the_first(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(session.uuid, "uuid4", lambda: "the same worker")
    with pair(tmp_path) as running:
        running.step()
        first = _attachment(running)
        steps = RandomSteps(Shape(), 2)
        with Session(
            steps.geometry, steps.k_caches, steps.fallback, settings=running.session.settings
        ) as second:
            second.wait_attached(SOON)
            assert first.bells.is_drained()
            assert running.service.status().sessions[0].epoch > first.epoch
            # Told apart, the replaced one attaches anew; nothing it answers is wrong.
            monkeypatch.undo()
            running.step()
        running.checker.assert_right()


def test_reports_that_nobody_reads_cost_no_answer(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Session, "_read_reports", lambda session: None)
    with pair(tmp_path, shape=Shape(layers=(1,), requests=1)) as running:
        for _ in range(RING_CAPACITY + 20):
            assert set(running.step(decode_only=True)) == {Source.SERVICE}
        running.checker.assert_right()


def test_a_stream_whose_client_does_not_read_is_ended_and_disturbs_nobody(
    tmp_path: Path, unread: threading.Event
) -> None:
    with pair(tmp_path, unread_reports=4, report_write_seconds=0.3) as running:
        running.step()
        attachment = _attachment(running)

        def plans() -> object:
            # Refused at once, each with a report.
            while not unread.is_set():
                yield pb.RunStepsRequest(
                    session_id=attachment.session_id,
                    plan=pb.StepPlan(step=1, epoch=attachment.epoch, layers=[9] * 200),
                )

        with grpc.insecure_channel(running.service.address) as channel:
            call = rpc.IndexerServiceStub(channel).RunSteps(plans())
            assert eventually(lambda: set(running.step()) == {Source.SERVICE} and unread.is_set())
            # How it ended can be seen only behind what was not read.
            with pytest.raises(grpc.RpcError) as error:
                for _ in call:
                    pass
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert set(running.step()) == {Source.SERVICE}
        running.checker.assert_right()


def test_a_service_restarted_while_the_worker_idles_is_found_before_the_next_step(
    start: Start, client_settings: object
) -> None:
    service = start()
    with in_this_process(client_settings, 5) as run:  # type: ignore[arg-type]
        run.attached_steps()
        service.kill()
        start()
        assert eventually(lambda: run.session.statistics.attachments == 2)
        run.attached_steps()
        assert run.session.statistics.inline_layers == 0
        assert run.session.statistics.detachments == 1
    run.checker.assert_right()


def test_another_configuration_keeps_the_worker_inline_and_says_why(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    steps = RandomSteps(Shape(), 3)

    class Other:
        hash = "0" * 64

    class Fallback:
        configuration = Other()
        __call__ = staticmethod(steps.fallback)

    settings = Settings(address=f"unix:{tmp_path / 'd' / 'i.sock'}")
    with (
        service_running(settings) as service,
        Session(
            steps.geometry,
            steps.k_caches,
            Fallback(),
            settings=session.ClientSettings(address=service.address, reattach_seconds=0.2),
        ) as made,
    ):
        running = Pair(service, made, steps)
        assert eventually(lambda: made.last_error is not None)
        assert set(running.step()) == {Source.INLINE}
        assert "required_configuration_hash" in str(made.last_error)
        assert "fix:" in str(made.last_error)
        running.checker.assert_right()
