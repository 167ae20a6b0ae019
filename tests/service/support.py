"""What the tests of the service share: a service in this process, and a worker for it."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from dsa_indexer_cli.racelab.service import LabService
from indexer_service.settings import Settings
from ipc_handoff.addresses import socket_path
from ipc_handoff.banks import BANK_REGIONS, HostBank, k_cache_region
from ipc_handoff.descriptors import (
    FIRST_REGION_TOKEN,
    WAKE_SERVICE_TOKEN,
    WAKE_WORKER_TOKEN,
    DescriptorConnection,
)
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.wakeups import Wakeup
from ipc_handoff.wire import geometry_message, host_region, layout_message
from tests.support.descriptors import copies_of
from tests.support.waiting import SOON

GEOMETRY = HandoffGeometry(
    layers=(3, 7),
    heads=16,
    head_dim=128,
    top_k=16,
    page_size=32,
    max_rows=8,
    max_requests=4,
    max_context=256,
)
PAGES = 8
K_CACHE_TOKEN = 40
_PAGE_WIDTH = 132


class LocalService(LabService):
    """The race lab's service in this process, and connections to it."""

    def __init__(self, settings: Settings, **parts: Any) -> None:
        super().__init__(settings, **parts)
        self._channels: list[grpc.Channel] = []
        self._own_stub: rpc.IndexerServiceStub | None = None

    def stop(self) -> None:
        for channel in self._channels:
            channel.close()
        super().stop()

    @property
    def directory(self) -> Path:
        path = socket_path(self.settings.address)
        assert path is not None
        return path.parent

    def channel(
        self, credentials: grpc.ChannelCredentials | None = None, *more_options: tuple[str, int]
    ) -> grpc.Channel:
        """A connection of its own, as another process would have."""
        options = [("grpc.use_local_subchannel_pool", 1), *more_options]
        if credentials is None:
            channel = grpc.insecure_channel(self.address, options=options)
        else:
            channel = grpc.secure_channel(self.address, credentials, options=options)
        self._channels.append(channel)
        return channel

    def stub(self) -> rpc.IndexerServiceStub:
        return rpc.IndexerServiceStub(self.channel())

    def status(self) -> pb.GetStatusResponse:
        if self._own_stub is None:
            self._own_stub = self.stub()
        return self._own_stub.GetStatus(pb.GetStatusRequest())


@contextmanager
def running(settings: Settings, **parts: Any) -> Iterator[LocalService]:
    """A started service that is stopped at the end."""
    service = LocalService(settings, **parts)
    try:
        yield service.start()
    finally:
        service.stop()


def open_request(
    shape: HandoffGeometry = GEOMETRY, instance: str = "", **fields: Any
) -> pb.OpenSessionRequest:
    """A request that is accepted; `fields` replace its own."""
    worker = pb.Worker(instance=instance or str(uuid.uuid4()), engine="test", pid=os.getpid())
    wanted: dict[str, Any] = {
        "worker": worker,
        "geometry": geometry_message(shape),
        "layout": layout_message(shape),
    }
    return pb.OpenSessionRequest(**(wanted | fields))


class Worker:
    """A worker with one session. Its K cache is one memory with a region for each layer.

    Args:
        stub: default: one with a connection of its own, as another process would have.
    """

    def __init__(
        self,
        service: LocalService,
        geometry: HandoffGeometry = GEOMETRY,
        *,
        stub: rpc.IndexerServiceStub | None = None,
        **fields: Any,
    ) -> None:
        self.service = service
        self.geometry = geometry
        self.stub = stub or service.stub()
        self.session = self.stub.OpenSession(open_request(geometry, **fields))
        self.id, self.epoch = self.session.session_id, self.session.epoch
        self.bank = HostBank(geometry, 0)
        self.bank.control.start(self.epoch)
        self.layer_bytes = PAGES * geometry.page_size * _PAGE_WIDTH
        self.k_cache = HostMemory.create(self.layer_bytes * len(geometry.layers), "k_cache")
        self.wakeups = {WAKE_SERVICE_TOKEN: Wakeup(), WAKE_WORKER_TOKEN: Wakeup()}
        self._connection: DescriptorConnection | None = None
        self.step = 0

    @property
    def connection(self) -> DescriptorConnection:
        if self._connection is None:
            path = self.service.directory / self.session.descriptor_socket
            self._connection = DescriptorConnection(str(path), self.session.descriptor_nonce)
        return self._connection

    def send(self, token: int, memory: HostMemory) -> None:
        self.connection.send(token, memory.fileno())

    def send_wakeups(self) -> None:
        for token, wakeup in self.wakeups.items():
            self.connection.send(token, wakeup.fileno())

    def bank_regions(self) -> list[pb.Region]:
        """Sends the bank's descriptors and describes its regions."""
        regions = []
        for token, name in enumerate(BANK_REGIONS, FIRST_REGION_TOKEN):
            memory = self.bank.memories[name]
            self.send(token, memory)
            regions.append(host_region(name, token, TensorSpec((memory.byte_size,), torch.uint8)))
        return regions

    def k_cache_regions(self, token: int = K_CACHE_TOKEN) -> list[pb.Region]:
        """Sends the K cache's descriptor and describes a region for each layer."""
        self.send(token, self.k_cache)
        return [self.k_cache_of(layer, token) for layer in self.geometry.layers]

    def k_cache_of(self, layer: int, token: int = K_CACHE_TOKEN) -> pb.Region:
        spec = TensorSpec((PAGES, self.geometry.page_size, _PAGE_WIDTH), torch.uint8)
        offset = self.geometry.layers.index(layer) * self.layer_bytes
        return host_region(k_cache_region(layer), token, spec, offset=offset)

    def register(self, *regions: pb.Region) -> int:
        """Bytes that the service has mapped for this session afterwards."""
        return self.stub.RegisterRegions(
            pb.RegisterRegionsRequest(session_id=self.id, epoch=self.epoch, regions=regions)
        ).mapped_bytes

    def unregister(self, *names: str) -> int:
        """Bytes that the service has mapped for this session afterwards."""
        return self.stub.UnregisterRegions(
            pb.UnregisterRegionsRequest(session_id=self.id, epoch=self.epoch, names=names)
        ).mapped_bytes

    def attach(self) -> "Worker":
        """Send and register everything that a step needs."""
        self.send_wakeups()
        self.register(*self.bank_regions(), *self.k_cache_regions())
        return self

    def plan(self, **fields: Any) -> pb.StepPlan:
        """The next step: one decode row of the first layer; `fields` replace its own."""
        self.step += 1
        wanted: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "rows": 1,
            "requests": 1,
            "decode_requests": 1,
            "rows_per_decode": 1,
            "layers": self.geometry.layers[:1],
            "max_length": self.geometry.top_k,
        }
        return pb.StepPlan(**(wanted | fields))

    def stage(self, plan: pb.StepPlan) -> int:
        """Stage and ring what `plan` promises; the length of its only request."""
        length = 1 + plan.step % self.geometry.top_k
        generations = self.bank.control.generations
        generations.inputs.begin(plan.step)
        slot = self.bank.staging[self.geometry.staging.slot_of(plan.step)]
        slot.q.copy_(torch.ones(slot.q.shape).to(slot.q.dtype))
        slot.weights.fill_(1.0)
        slot.query_start.copy_(torch.arange(len(slot.query_start), dtype=torch.int32))
        slot.seq_lens.fill_(length)
        slot.block_table.zero_()
        generations.inputs.end(plan.step)
        self.bank.control.bells.publish(plan.step)
        for layer in plan.layers:
            ordinal = self.geometry.layers.index(layer)
            generations.layers.end(plan.step, ordinal)
            self.bank.control.bells.request(ordinal, plan.step)
        self.wakeups[WAKE_SERVICE_TOKEN].ring()
        return length

    def answer(self, plan: pb.StepPlan) -> list[int]:
        """The first row's indices."""
        answers = self.bank.answers[self.geometry.answers.slot_of(plan.step)]
        return answers[0].tolist()  # type: ignore[no-any-return]

    def select(self, plan: pb.StepPlan) -> pb.StepReport:
        request = pb.SelectTopKRequest(session_id=self.id, plan=plan)
        return self.stub.SelectTopK(request, timeout=2 * SOON).report

    def works(self) -> bool:
        """Whether one more step gets the right answer (every token, as there are few)."""
        plan = self.plan()
        length = self.stage(plan)
        report = self.select(plan)
        expected = [*range(length), *[-1] * (self.geometry.top_k - length)]
        return report.status == pb.STEP_STATUS_ANSWERED and self.answer(plan) == expected

    def duplicates(self) -> int:
        """Descriptors of this process for what can be sent, also those of the worker's own maps."""
        sent = [*self.bank.memories.values(), self.k_cache, *self.wakeups.values()]
        return sum(copies_of(each.fileno()) - 1 for each in sent)

    def keep_alive(self) -> float:
        request = pb.KeepAliveRequest(session_id=self.id, epoch=self.epoch)
        return self.stub.KeepAlive(request).lease_seconds

    def close(self) -> int:
        """End the session; how many steps that cancelled."""
        request = pb.CloseSessionRequest(session_id=self.id, epoch=self.epoch)
        return self.stub.CloseSession(request).cancelled_steps

    def leave(self) -> None:
        """Give up this side's memory, as its death would."""
        if self._connection is not None:
            self._connection.close()
        self.bank.close()
        self.k_cache.close()
        for wakeup in self.wakeups.values():
            wakeup.close()


@contextmanager
def refused(code: grpc.StatusCode, field: str, *parts: str) -> Iterator[None]:
    """The call inside is answered with `code` and a message that names field and fix."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    seen = f"{caught.value.code()}: {caught.value.details()}"
    assert caught.value.code() == code, seen
    details = caught.value.details()
    assert details.startswith(f"{field}: "), seen
    assert "(fix: " in details, seen
    assert all(part in details for part in parts), seen


def mappings() -> set[str]:
    """Mappings of shared memory in this process, the worker's own included."""
    with open("/proc/self/maps") as maps:
        return {line for line in maps if "dsa-indexer:" in line}
