"""The service as a whole: health, reflection, warm-up, shutdown, and faults of its own."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_service import server
from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.cpu import CpuEngine
from indexer_service.errors import StartError
from indexer_service.server import SERVICE_NAME, Service
from indexer_service.serving import serve
from indexer_service.settings import Settings
from indexer_service.socket_directory import SocketDirectory
from indexer_service.status import StatusReporter
from tests.service.processes import ServiceProcess, is_served_by
from tests.service.support import LocalService, Worker, open_request, refused, running
from tests.support.fake_cuda import Machine, Process, running_as
from tests.support.waiting import SOON, eventually

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HeldEngine(CpuEngine):
    """Holds warm-up or selections until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(EngineSettings(workspace_bytes=1 << 24, cpu_threads=1))
        self.warm, self.go, self.selecting = threading.Event(), threading.Event(), threading.Event()
        self.warm.set()

    def warm_up(self) -> None:
        self.warm.wait(2 * SOON)
        self.go.set()
        super().warm_up()
        self.go.clear()
        self.selecting.clear()

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        self.selecting.set()
        self.go.wait(2 * SOON)
        super().select(inputs, top_k, out, on_stage)


class BrokenEngine(CpuEngine):
    def __init__(self) -> None:
        super().__init__(EngineSettings(workspace_bytes=1 << 24, cpu_threads=1))

    def warm_up(self) -> None:
        raise RuntimeError("no such device")


def health(service: LocalService, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(service.channel())
    return stub.Check(health_pb2.HealthCheckRequest(service=name)).status


def test_health_is_serving_for_the_server_and_the_service(service: LocalService) -> None:
    assert health(service) == SERVING
    assert health(service, SERVICE_NAME) == SERVING


def test_reflection_shows_the_contract(service: LocalService) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel())
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(stub.ServerReflectionInfo(iter([request])))
    names = {found.name for found in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(service.channel()))
    methods = {method.name for method in pool.FindServiceByName(SERVICE_NAME).methods}
    assert methods == {
        method.name for method in pb.DESCRIPTOR.services_by_name["IndexerService"].methods
    }


def test_while_warming_it_answers_and_takes_no_session(settings: Settings) -> None:
    engine = HeldEngine()
    engine.warm.clear()
    service = LocalService(settings, engine=engine)
    starting = threading.Thread(target=service.start)
    starting.start()
    try:
        path = service.directory / "i.sock"
        assert eventually(path.is_socket)
        assert health(service) == NOT_SERVING
        assert not service.status().serving
        with refused(UNAVAILABLE, "service", "warming"):
            service.stub().OpenSession(open_request())
        engine.warm.set()
        starting.join()
        assert health(service) == SERVING
        assert service.status().serving
    finally:
        engine.warm.set()
        starting.join()
        service.stop()


def test_an_engine_that_does_not_work_stops_the_start(settings: Settings) -> None:
    with (
        pytest.raises(StartError, match=r"engine: .*no such device.*\(fix: "),
        running(settings, engine=BrokenEngine()),
    ):
        pass
    assert not os.path.exists(settings.address.removeprefix("unix:"))


def test_an_unknown_engine_is_refused_at_the_start(settings: Settings) -> None:
    with pytest.raises(StartError, match=r"engine: 'abacus'.*\(fix: "):
        Service(settings.model_copy(update={"engine": "abacus"}))


def test_one_sessions_long_step_holds_up_nobody(settings: Settings) -> None:
    engine = HeldEngine()
    with running(settings, engine=engine) as service:
        slow, other = Worker(service).attach(), Worker(service).attach()
        plan = slow.plan()
        slow.stage(plan)
        request = pb.SelectTopKRequest(session_id=slow.id, plan=plan)
        call = slow.stub.SelectTopK.future(request)
        assert engine.selecting.wait(SOON)
        closing = slow.stub.CloseSession.future(
            pb.CloseSessionRequest(session_id=slow.id, epoch=slow.epoch)
        )
        # Draining waits for the engine; meanwhile everybody else is served.
        for _ in range(12):
            Worker(service).attach().leave()
        assert other.keep_alive()
        assert not closing.done()
        assert service.status().mapped_bytes > 0
        engine.go.set()
        assert call.result(SOON).report.status == pb.STEP_STATUS_CANCELLED
        assert closing.result(SOON).cancelled_steps == 1
        assert other.works()


def test_stopping_waits_for_a_session_that_ends_already(settings: Settings) -> None:
    """Its threads must not outlive the interpreter: they use the GPU, and memory of the worker."""
    engine = HeldEngine()
    service = LocalService(settings, engine=engine).start()
    worker = Worker(service).attach()
    plan = worker.plan()
    worker.stage(plan)
    call = worker.stub.SelectTopK.future(pb.SelectTopKRequest(session_id=worker.id, plan=plan))
    assert engine.selecting.wait(SOON)
    worker.connection.close()
    assert eventually(lambda: not service.status().sessions)
    stopping = threading.Thread(target=service.stop)
    stopping.start()
    assert not eventually(lambda: not stopping.is_alive(), 0.5)
    engine.go.set()
    stopping.join(SOON)
    assert not stopping.is_alive()
    assert call.done()


def test_stopping_answers_the_steps_that_have_arrived(settings: Settings) -> None:
    engine = HeldEngine()
    service = LocalService(settings, engine=engine).start()
    worker = Worker(service).attach()
    plan = worker.plan()
    length = worker.stage(plan)
    call = worker.stub.SelectTopK.future(pb.SelectTopKRequest(session_id=worker.id, plan=plan))
    idle = worker.stub.RunSteps(
        iter([pb.RunStepsRequest(session_id=worker.id, plan=worker.plan(layers=[99]))])
    )
    assert engine.selecting.wait(SOON)
    other = service.stub()
    other.GetStatus(pb.GetStatusRequest())
    stopping = threading.Thread(target=lambda: service._call(service.service.stop()))
    stopping.start()
    assert eventually(lambda: health(service) == NOT_SERVING)
    with refused(UNAVAILABLE, "service", "shutting down"):
        other.OpenSession(open_request())
    with refused(UNAVAILABLE, "service", "shutting down"):
        worker.keep_alive()
    engine.go.set()
    assert call.result(SOON).report.status == pb.STEP_STATUS_ANSWERED
    assert worker.answer(plan)[:length] == list(range(length))
    assert next(idle).report.status == pb.STEP_STATUS_REJECTED
    stopping.join(SOON)
    assert worker.bank.control.bells.is_drained()
    assert not service.directory.exists()
    worker.leave()


def test_stopping_does_not_wait_for_a_step_beyond_its_grace(settings: Settings) -> None:
    bounds = {"shutdown_grace_seconds": 1.0, "gate_bound_seconds": 2 * SOON}
    service = LocalService(settings.model_copy(update=bounds)).start()
    worker = Worker(service).attach()
    call = worker.stub.SelectTopK.future(
        pb.SelectTopKRequest(session_id=worker.id, plan=worker.plan())
    )
    assert eventually(lambda: service.status().sessions[0].last_step == 1)
    began = time.monotonic()
    service._call(service.service.stop())
    assert time.monotonic() - began < SOON
    assert call.result(SOON).report.status == pb.STEP_STATUS_CANCELLED
    assert worker.bank.control.bells.is_drained()
    worker.leave()


def test_a_fault_of_the_services_own_is_internal_and_logged(
    service: LocalService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: StatusReporter) -> pb.GetStatusResponse:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(StatusReporter, "status", fail)
        with pytest.raises(grpc.RpcError) as caught:
            service.status()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert "secret detail" in caplog.text
    assert service.status().serving


def test_a_client_that_hangs_up_leaves_the_call_finished(settings: Settings) -> None:
    """A registration goes to its end even if nobody waits for it any more."""
    with running(settings) as service:
        worker = Worker(service)
        worker.send_wakeups()
        regions = [*worker.bank_regions(), *worker.k_cache_regions()]
        request = pb.RegisterRegionsRequest(
            session_id=worker.id, epoch=worker.epoch, regions=regions
        )
        for _ in range(5):
            worker.stub.RegisterRegions.future(request).cancel()
        worker.stub.RegisterRegions.future(request, timeout=0.001).exception()
        time.sleep(0.2)
        assert service.status().sessions[0].mapped_bytes in (0, service.status().mapped_bytes)
        worker.close()
        assert service.status().mapped_bytes == 0
        worker.leave()


def test_a_signal_while_the_address_is_claimed_leaves_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = SocketDirectory.claim

    def slow(self: SocketDirectory) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        claim(self)

    monkeypatch.setattr(SocketDirectory, "claim", slow)
    asyncio.run(serve(settings))
    time.sleep(1)
    assert not Path(settings.address.removeprefix("unix:")).parent.exists()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_on_a_gpu_no_thread_keeps_pythons_lock_for_long(
    device: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some hand-overs of the lock within a step must be short beside the 20 ms of a wait."""
    before = sys.getswitchinterval()
    engine = CpuEngine(EngineSettings(workspace_bytes=1 << 24, cpu_threads=1))
    monkeypatch.setattr(server, "_engine", lambda *_: engine)

    async def end(service: Service) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Service, "start", end)
    try:
        with running_as(Process(Machine(), 200)):
            bounds = {"device": device, "gate_bound_seconds": 1.0}
            asyncio.run(serve(settings.model_copy(update=bounds)))
        found = sys.getswitchinterval()
    finally:
        sys.setswitchinterval(before)
    assert found == before if device == "cpu" else found <= 0.0005


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly(
    number: int, tmp_path: Path, processes: list[ServiceProcess]
) -> None:
    path = tmp_path / "d" / "i.sock"
    process = ServiceProcess(path, tmp_path / "log", shutdown_grace_seconds=3)
    processes.append(process)
    process.wait_until_serving()
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = rpc.IndexerServiceStub(channel)
        stub.OpenSession(open_request())
        process.signal(number)
        assert process.process.wait(SOON) == 0
    assert not path.parent.exists()
    assert not is_served_by(path, process.process.pid)
    assert "Traceback" not in process.log.read_text()
