"""A session that gets random and mutated requests, and what an answer to one may be."""

import random
from collections.abc import Callable
from contextlib import suppress

import grpc
from google.protobuf.message import Message

from dsa_indexer.v1 import indexer_pb2 as pb
from ipc_handoff.banks import BANK_REGIONS
from ipc_handoff.descriptors import FIRST_REGION_TOKEN
from ipc_handoff.errors import DescriptorRefused
from tests.service.mutations import mutate
from tests.service.support import K_CACHE_TOKEN, LocalService, Worker, open_request
from tests.support.waiting import SOON

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
KINDS = ("message", "message", "message", "bytes", "flipped")
MOST_MUTATIONS = 4


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

    def send_random(
        self, call: str, kind: str, mutations: int, garbage: bytes, chance: random.Random
    ) -> grpc.StatusCode:
        """Send one random request of `call`; fails unless the answer is a documented one.

        Args:
            kind: one of KINDS: the message, mutated; `garbage`; or the message with flipped bits.
        """
        self.renew()
        message = self.request(call)
        for _ in range(mutations):
            mutate(message, chance)
        data = bytearray(message.SerializeToString())
        if kind == "bytes":
            data = bytearray(garbage)
        elif kind == "flipped" and data:
            for _ in range(1 + mutations):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        code, details = self.send(call, bytes(data))
        assert code in DOCUMENTED, f"{call} {message}: {code} {details}"
        if code != grpc.StatusCode.OK:
            assert "(fix: " in details and len(details) < 2000, f"{code}: {details}"
        untouched = call == "OpenSession" and kind == "message" and mutations == 0
        assert not untouched or code == grpc.StatusCode.OK, f"{code}: {details}"
        return code

    def close_opened(self) -> None:
        """End the sessions that random requests have opened."""
        stub = self._service.stub()
        for session in self.opened:
            with suppress(grpc.RpcError):  # superseded, or its lease ran out
                stub.CloseSession(
                    pb.CloseSessionRequest(session_id=session.session_id, epoch=session.epoch)
                )
        self.opened.clear()

    def send(self, call: str, data: bytes) -> tuple[grpc.StatusCode, str]:
        """Send bytes as a request of `call`; how it was answered.

        A stream that ends well is answered as its first report that tells of a fault.
        """
        try:
            if call == "RunSteps":
                method = self._channel.stream_stream(PREFIX + call)
                for reply in method(iter([data]), timeout=2 * SOON):
                    report = pb.RunStepsResponse.FromString(reply).report
                    if report.status == pb.STEP_STATUS_FAILED or report.code == INTERNAL.value[0]:
                        return INTERNAL, report.message
            else:
                reply = self._channel.unary_unary(PREFIX + call)(data, timeout=2 * SOON)
                if call == "OpenSession":
                    self.opened.append(pb.OpenSessionResponse.FromString(reply))
        except grpc.RpcError as error:
            return error.code(), error.details()
        return grpc.StatusCode.OK, ""
