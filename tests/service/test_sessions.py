"""Sessions: terms, epochs, leases, replacement, groups, and the worker's death."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.sessions import Session
from indexer_service.settings import Settings
from ipc_handoff.wire import layout_message
from tests.service.support import (
    GEOMETRY,
    LocalService,
    Worker,
    mappings,
    open_request,
    refused,
    running,
)
from tests.support.waiting import SOON, eventually

FAILED = grpc.StatusCode.FAILED_PRECONDITION
MakeWorker = Callable[..., Worker]

LEASE = 3600.0


@pytest.fixture(scope="module")
def leasing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    path = tmp_path_factory.mktemp("s") / "d" / "i.sock"
    with running(Settings(address=f"unix:{path}", lease_seconds=LEASE)) as service:
        yield service


def session_of(worker: Worker) -> Session:
    table = worker.service.service._table
    assert table is not None
    (session,) = [each for each in table.sessions if each.epoch == worker.epoch]
    return session


def silent_for(worker: Worker, seconds: float) -> None:
    """As if it had said nothing for so long."""
    session_of(worker)._deadline -= seconds


def test_a_session_is_told_its_terms_and_why(worker: Worker) -> None:
    told = worker.session
    assert told.placement == pb.PLACEMENT_CPU
    assert told.signalling == pb.SIGNALLING_RING
    assert told.lease_seconds == 10
    assert told.configuration.engine == "cpu-reference"
    assert len(told.configuration.hash) == 64
    assert len(told.descriptor_nonce) == 16
    assert told.layout == layout_message(GEOMETRY)
    assert [reason.split()[0] for reason in told.reasons] == ["placement", "signalling", "engine"]


def test_the_stream_can_be_asked_for(make_worker: MakeWorker) -> None:
    worker = make_worker(signalling=pb.SIGNALLING_STREAM)
    assert worker.session.signalling == pb.SIGNALLING_STREAM
    assert worker.attach().works()


def test_a_step_of_a_new_session_is_answered(worker: Worker) -> None:
    assert worker.works()
    assert worker.works()


def test_status_shows_regions_bytes_and_counters(worker: Worker, service: LocalService) -> None:
    assert worker.works()
    status = service.status()
    shown = next(s for s in status.sessions if s.epoch == worker.epoch)
    assert status.serving and status.pid and status.version
    assert status.mapped_bytes >= shown.mapped_bytes > 0
    assert list(shown.regions) == ["answers", "control", "k_cache/3", "k_cache/7", "staging"]
    assert (shown.answered_steps, shown.last_step, shown.queued_steps) == (1, worker.step, 0)
    assert shown.worker.model == "target"
    # Knowing it, anybody could open a session that ends this one.
    assert not shown.worker.instance
    assert worker.id not in str(status)
    assert 0 < shown.lease_remaining_seconds <= 10


def test_what_the_contract_does_not_know_of_a_worker_is_not_kept(
    make_worker: MakeWorker, service: LocalService
) -> None:
    extended = pb.Worker(instance="extended", engine="test")
    extended.MergeFromString(b"\xfa\x3f\x90\x4e" + b"x" * 10_000)  # field 1023
    assert extended.ByteSize() > 10_000
    worker = make_worker(worker=extended)
    shown = next(s for s in service.status().sessions if s.epoch == worker.epoch)
    assert shown.worker.engine == "test"
    assert shown.worker.ByteSize() < 100


def test_epochs_ascend_within_and_over_services_while_the_clock_does(settings: Settings) -> None:
    epochs = []
    for _ in range(2):
        with running(settings) as service:
            epochs += [service.stub().OpenSession(open_request()).epoch for _ in range(3)]
    assert epochs == sorted(set(epochs))


def test_a_closed_session_is_not_found(worker: Worker) -> None:
    assert worker.close() == 0
    with refused(grpc.StatusCode.NOT_FOUND, "session_id", "closed"):
        worker.keep_alive()


def test_closing_unmaps_everything(make_worker: MakeWorker, service: LocalService) -> None:
    worker = make_worker()
    own, held = mappings(), worker.duplicates()
    worker.attach()
    assert worker.works()
    assert mappings() - own
    assert worker.duplicates() > held
    worker.close()
    assert all(s.epoch != worker.epoch for s in service.status().sessions)
    assert mappings() <= own
    assert worker.duplicates() == held


def test_closing_cancels_the_running_step_and_says_so(worker: Worker) -> None:
    plan = worker.plan()
    call = worker.stub.SelectTopK.future(pb.SelectTopKRequest(session_id=worker.id, plan=plan))
    assert eventually(lambda: worker.service.status().sessions[-1].last_step == plan.step)
    assert worker.close() == 1
    assert call.result(SOON).report.status == pb.STEP_STATUS_CANCELLED
    assert worker.bank.control.bells.is_drained()


def test_a_wrong_epoch_is_refused_with_both(worker: Worker) -> None:
    with refused(FAILED, "epoch", "1,", str(worker.epoch)):
        worker.stub.KeepAlive(pb.KeepAliveRequest(session_id=worker.id, epoch=1))
    assert worker.works()


def test_the_same_worker_replaces_its_session(make_worker: MakeWorker, worker: Worker) -> None:
    first = make_worker(instance="again").attach()
    second = make_worker(instance="again").attach()
    assert second.epoch > first.epoch
    assert first.bank.control.bells.is_drained()
    with refused(FAILED, "epoch", str(first.epoch), str(second.epoch)):
        first.keep_alive()
    assert second.works()
    assert worker.works()


def test_target_and_draft_of_one_worker_are_two_sessions(make_worker: MakeWorker) -> None:
    target, draft = (
        make_worker(worker=pb.Worker(instance="both", model=model)).attach()
        for model in ("target", "draft")
    )
    assert target.works()
    assert draft.works()


def test_a_lease_that_ran_out_is_unauthenticated(
    make_worker: MakeWorker, leasing: LocalService
) -> None:
    worker = make_worker(leasing).attach()
    assert leasing.status().mapped_bytes > 0
    silent_for(worker, LEASE)
    assert eventually(lambda: not leasing.status().sessions)
    assert eventually(lambda: leasing.status().mapped_bytes == 0)
    assert worker.bank.control.bells.is_drained()
    with refused(grpc.StatusCode.UNAUTHENTICATED, "session_id", "lease"):
        worker.keep_alive()
    with refused(grpc.StatusCode.UNAUTHENTICATED, "session_id", "lease"):
        worker.select(worker.plan())


def test_calls_renew_the_lease(make_worker: MakeWorker, leasing: LocalService) -> None:
    worker = make_worker(leasing).attach()
    for renews in (lambda: worker.keep_alive() == LEASE, worker.works):
        silent_for(worker, LEASE / 2)
        assert session_of(worker).lease_remaining < LEASE / 2
        assert renews()
        assert session_of(worker).lease_remaining > LEASE / 2


def test_a_lease_that_runs_out_leaves_others_alone(
    make_worker: MakeWorker, leasing: LocalService
) -> None:
    silent, busy = make_worker(leasing).attach(), make_worker(leasing).attach()
    silent_for(silent, LEASE)
    assert eventually(lambda: busy.works() and len(leasing.status().sessions) == 1)
    assert busy.works()
    with refused(grpc.StatusCode.UNAUTHENTICATED, "session_id"):
        silent.keep_alive()


def test_the_end_of_the_workers_connection_unmaps_at_once(
    make_worker: MakeWorker, service: LocalService, worker: Worker
) -> None:
    leaving = make_worker().attach()
    leaving.connection.close()
    assert eventually(lambda: all(s.epoch != leaving.epoch for s in service.status().sessions))
    with refused(grpc.StatusCode.NOT_FOUND, "session_id", "connection"):
        leaving.keep_alive()
    assert worker.works()


def test_a_killed_worker_is_gone_though_its_child_holds_the_connection(
    service: LocalService, repository: Path
) -> None:
    """The connection's end is not seen then; the process's death is."""
    script = f"""
import os, sys
sys.path[:0] = {[str(repository), str(repository / "proto")]!r}
from ipc_handoff.descriptors import DescriptorConnection
path, nonce = sys.argv[1], bytes.fromhex(sys.argv[2])
connection = DescriptorConnection(path, nonce)
child = os.fork()
if child:
    print("connected", flush=True)
sys.stdin.read()  # until the test has seen the end of this process
os._exit(0)
"""
    opened = service.stub().OpenSession(open_request())
    path = service.directory / opened.descriptor_socket
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), opened.descriptor_nonce.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "connected\n"
    time.sleep(0.3)
    process.kill()
    gone = eventually(lambda: all(s.epoch != opened.epoch for s in service.status().sessions))
    process.wait()
    process.stdout.close()
    process.stdin.close()
    assert gone


def test_the_limit_of_sessions(settings: Settings) -> None:
    with running(settings.model_copy(update={"max_sessions": 2})) as service:
        stub = service.stub()
        stub.OpenSession(open_request(instance="a"))
        stub.OpenSession(open_request(instance="b"))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "session", "max_sessions"):
            stub.OpenSession(open_request(instance="c"))
        stub.OpenSession(open_request(instance="a"))


def grouped(rank: int, size: int = 2, name: str = "g", instance: str = "") -> pb.Worker:
    return pb.Worker(
        instance=instance or f"{name}{rank}{size}", group=pb.Group(name=name, rank=rank, size=size)
    )


def test_ranks_of_a_group_open_beside_each_other(make_worker: MakeWorker) -> None:
    workers = [make_worker(worker=grouped(rank)).attach() for rank in range(2)]
    assert all(worker.works() for worker in workers)


def test_ranks_of_a_group_agree_on_its_size(make_worker: MakeWorker) -> None:
    make_worker(worker=grouped(0, 2, "size"))
    with refused(FAILED, "worker.group.size", "3", "2"):
        make_worker(worker=grouped(1, 3, "size"))


def test_ranks_of_a_group_agree_on_geometry(make_worker: MakeWorker) -> None:
    make_worker(worker=grouped(0, 2, "shape"))
    other = replace(GEOMETRY, max_rows=4)
    with refused(FAILED, "geometry", "ranks"):
        make_worker(worker=grouped(1, 2, "shape"), geometry=other)


def test_a_rank_is_taken_once_unless_replaced(make_worker: MakeWorker) -> None:
    make_worker(worker=grouped(0, 2, "rank", "one"))
    with refused(FAILED, "worker.group.rank", "0"):
        make_worker(worker=grouped(0, 2, "rank", "two"))
    make_worker(worker=grouped(0, 2, "rank", "one"))
