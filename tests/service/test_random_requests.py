"""Thousands of random and mutated requests: documented codes only, and nobody else notices."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.engine import EngineSettings
from indexer_service.engines.cpu import CpuEngine
from indexer_service.settings import Settings
from ipc_handoff.banks import BANK_REGIONS
from ipc_handoff.descriptors import FIRST_REGION_TOKEN
from ipc_handoff.errors import DescriptorRefused
from tests.service.mutations import mutate
from tests.service.support import K_CACHE_TOKEN, LocalService, Worker, open_request, running
from tests.support.waiting import eventually

REQUESTS = 2150
PREFIX = "/dsa_indexer.v1.IndexerService/"
INTERNAL = grpc.StatusCode.INTERNAL
DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAUTHENTICATED,
}
CALLS = (
    "OpenSession",
    "RegisterRegions",
    "UnregisterRegions",
    "SelectTopK",
    "RunSteps",
    "KeepAlive",
    "CloseSession",
    "GetStatus",
)


class Victim:
    """Two sessions that get the mutated requests: one for regions, one for all else.

    Each is made anew whenever a request has ended it.
    """

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self.worker = Worker(service).attach()
        self.bare = Worker(service)
        self._channel = service.channel()
        self.opened: list[pb.OpenSessionResponse] = []

    def renew(self) -> None:
        try:
            self.worker.keep_alive()
        except grpc.RpcError:
            self.worker.leave()
            self.worker = Worker(self._service).attach()
        try:
            self.bare.keep_alive()
        except grpc.RpcError:
            self.bare.leave()
            self.bare = Worker(self._service)
        registered = next(
            list(session.regions)
            for session in self._service.status().sessions
            if session.epoch == self.bare.epoch
        )
        if registered:
            self.bare.unregister(*registered)

    def leave(self) -> None:
        self.worker.leave()
        self.bare.leave()

    def request(self, call: str) -> Message:
        """A request that is right, or nearly so."""
        worker = self.worker
        session = {"session_id": worker.id, "epoch": worker.epoch}
        bare = {"session_id": self.bare.id, "epoch": self.bare.epoch}
        trace = pb.TraceContext(trace_id=bytes(16), span_id=bytes(8))
        plan = worker.plan(exact=pb.ExactValues(seq_lens=[3]), trace=trace)
        worker.stage(plan)
        messages: dict[str, Callable[[], Message]] = {
            "OpenSession": lambda: open_request(instance="random"),
            "RegisterRegions": lambda: pb.RegisterRegionsRequest(**bare, regions=self.regions()),
            "UnregisterRegions": lambda: pb.UnregisterRegionsRequest(
                **session, names=["k_cache/3", "k_cache/7"]
            ),
            "SelectTopK": lambda: pb.SelectTopKRequest(session_id=worker.id, plan=plan),
            "RunSteps": lambda: pb.RunStepsRequest(session_id=worker.id, plan=plan),
            "KeepAlive": lambda: pb.KeepAliveRequest(**session),
            "CloseSession": lambda: pb.CloseSessionRequest(**session),
            "GetStatus": pb.GetStatusRequest,
        }
        return messages[call]()

    def regions(self) -> list[pb.Region]:
        """Of a bank and a K cache, whose descriptors wait to be mapped."""
        worker = self.bare
        tokens = dict(enumerate(BANK_REGIONS, FIRST_REGION_TOKEN))
        for token, memory in (
            *((token, worker.bank.memories[name]) for token, name in tokens.items()),
            (K_CACHE_TOKEN, worker.k_cache),
        ):
            with suppress(DescriptorRefused):  # it waits there since a request before
                worker.send(token, memory)
        regions = [
            pb.Region(
                name=name,
                host=pb.HostMemory(token=token),
                byte_size=worker.bank.memories[name].byte_size,
                shape=[worker.bank.memories[name].byte_size],
                data_type=pb.DATA_TYPE_UINT8,
            )
            for token, name in tokens.items()
        ]
        return [*regions, *(worker.k_cache_of(layer) for layer in worker.geometry.layers)]

    def send(self, call: str, data: bytes) -> tuple[grpc.StatusCode, str]:
        """Send bytes as a request of `call`; how it was answered.

        A stream that ends well is answered as its first report that tells of a fault.
        """
        try:
            if call == "RunSteps":
                method = self._channel.stream_stream(PREFIX + call)
                for reply in method(iter([data]), timeout=20):
                    report = pb.RunStepsResponse.FromString(reply).report
                    if report.status == pb.STEP_STATUS_FAILED or report.code == INTERNAL.value[0]:
                        return INTERNAL, report.message
            else:
                reply = self._channel.unary_unary(PREFIX + call)(data, timeout=20)
                if call == "OpenSession":
                    self.opened.append(pb.OpenSessionResponse.FromString(reply))
        except grpc.RpcError as error:
            return error.code(), error.details()
        return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    path = tmp_path_factory.mktemp("s") / "d" / "i.sock"
    bounds = {"gate_bound_seconds": 0.002, "max_sessions": 256}
    with running(Settings(address=f"unix:{path}", **bounds)) as service:
        yield service


class FailingEngine(CpuEngine):
    def select(self, *_: object) -> None:
        raise ZeroDivisionError("of the engine")


@pytest.mark.parametrize("call", ["RunSteps", "SelectTopK"])
def test_a_step_that_fails_is_seen_in(call: str, tmp_path: Path) -> None:
    """What the random requests look for."""
    engine = FailingEngine(EngineSettings(workspace_bytes=1 << 24, cpu_threads=1))
    engine.warm_up = lambda: None  # type: ignore[method-assign]
    with running(Settings(address=f"unix:{tmp_path}/d/i.sock"), engine=engine) as service:
        victim = Victim(service)
        code, details = victim.send(call, victim.request(call).SerializeToString())
        assert (code, details) == (INTERNAL, "engine: of the engine")
        victim.leave()


def test_random_and_mutated_requests(quick: LocalService) -> None:
    neighbour = Worker(quick).attach()
    assert neighbour.works()
    victim = Victim(quick)
    seen: dict[str, set[grpc.StatusCode]] = {call: set() for call in CALLS}
    sent = 0

    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        # A failure is named by its seed; making it smaller would take thousands of requests.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        call=st.sampled_from(CALLS),
        seed=st.integers(0, 2**32),
        mutations=st.integers(0, 4),
        garbage=st.binary(max_size=200),
        kind=st.sampled_from(["message", "message", "message", "bytes", "flipped"]),
    )
    def send_one(call: str, seed: int, mutations: int, garbage: bytes, kind: str) -> None:
        nonlocal sent
        chance = random.Random(seed)
        victim.renew()
        message = victim.request(call)
        for _ in range(mutations):
            mutate(message, chance)
        data = bytearray(message.SerializeToString())
        if kind == "bytes":
            data = bytearray(garbage)
        elif kind == "flipped" and data:
            for _ in range(1 + mutations):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if call == "OpenSession" and kind == "message" and mutations == 0:
            assert victim.send(call, bytes(data))[0] == grpc.StatusCode.OK
            return
        code, details = victim.send(call, bytes(data))
        sent += 1
        seen[call].add(code)
        assert code in DOCUMENTED, f"{call} {message}: {code} {details}"
        if code != grpc.StatusCode.OK:
            assert "(fix: " in details and len(details) < 2000, f"{code}: {details}"
        if sent % 100 == 0:
            assert neighbour.works()

    send_one()
    assert sent >= 2000
    assert all(len(codes) > 1 for call, codes in seen.items() if call != "GetStatus"), seen
    assert neighbour.works()
    assert quick.status().serving and quick.status().pid == os.getpid()
    victim.leave()
    neighbour.close()
    neighbour.leave()
    stub = quick.stub()
    for session in victim.opened:
        with suppress(grpc.RpcError):  # superseded, or its lease ran out
            stub.CloseSession(
                pb.CloseSessionRequest(session_id=session.session_id, epoch=session.epoch)
            )
    assert eventually(lambda: quick.status().mapped_bytes == 0)
