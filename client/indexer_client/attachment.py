"""One attachment: a session of the service, a bank, and the way between them.

Made by `attach`, used by one thread (the one that runs steps), ended by `detach` (at once, on
the hot path) and `release` (the rest, off it).
"""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.agreement import check_opened
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import REFUSALS, AttachRefused, IndexerError
from indexer_client.plan_channel import PlanChannel, RingPlans, StreamPlans
from indexer_client.registering import Registering
from indexer_client.remote_traces import RemoteTraces
from indexer_client.settings import ClientSettings
from ipc_handoff.addresses import socket_path
from ipc_handoff.banks import Bank, BankPool, k_cache_region
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.descriptors import (
    FIRST_REGION_TOKEN,
    WAKE_SERVICE_TOKEN,
    WAKE_WORKER_TOKEN,
    DescriptorConnection,
)
from ipc_handoff.doorbells import WorkerBells
from ipc_handoff.errors import DescriptorRefused
from ipc_handoff.flag_words import FLAGS
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.processes import ProcessWatch
from ipc_handoff.regions import DTYPES, HostMemory, SharedMemory, SharedTensor, TensorSpec
from ipc_handoff.telemetry.tracing import Tracing
from ipc_handoff.wakeups import Wakeup
from ipc_handoff.wire import (
    cuda_region,
    geometry_message,
    host_region,
    layout_message,
    placement_name,
)

logger = logging.getLogger(__name__)

_SIGNALLING = {"ring": pb.SIGNALLING_RING, "stream": pb.SIGNALLING_STREAM}


@dataclass(frozen=True)
class AttachRequest:
    """What every attachment of a worker has in common.

    Attributes:
        worker: with the UUID of its GPU, if it is on one.
        k_caches: in memory of the kind that the banks have.
        flags: what streams sleep on under PLACEMENT_TIMESLICE.
        placement: the only one that is accepted. Unspecified: any for which worker and service
            have the memory: PLACEMENT_CPU, or one on a GPU if the worker is on one.
    """

    settings: ClientSettings
    worker: pb.Worker
    geometry: HandoffGeometry
    k_caches: Mapping[int, SharedTensor]
    configuration_hash: str
    tracing: Tracing | None
    placement: pb.Placement = pb.PLACEMENT_UNSPECIFIED
    flags: HostMemory | None = None


class Attachment:
    """See the module. Public attributes are read-only.

    Attributes:
        epoch: of the session; goes into every plan.
        lease_seconds: how often the service wants to hear from us, at least.
        engine, placement: what was agreed, by name.
        remote_traces: of the steps that the service was asked for.
        reasons: a sentence each: why this engine, placement and signalling.
        watch: of the service's process.
    """

    def __init__(
        self,
        request: AttachRequest,
        bank: Bank,
        on_detached: Callable[[], None],
        on_lost_stamps: Callable[[int], None],
    ) -> None:
        self._request = request
        self._on_detached = on_detached
        self._on_lost_stamps = on_lost_stamps
        self.bank = bank
        self.bells: WorkerBells
        self.plans: PlanChannel
        self.control_plane = ControlPlane(request.settings, request.tracing)
        self.wake_service, self.wake_worker = Wakeup(), Wakeup()
        self._resources = ExitStack()
        for resource in (self.wake_service, self.wake_worker, self.control_plane):
            self._resources.callback(resource.close)
        self.watch = ProcessWatch(0)
        # The service has mapped the bank; it may have, and nobody will say when it is drained.
        self._exposed = self._perhaps_exposed = False
        self.detached_because = ""

    def open(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Open the session and register everything, which may take minutes.

        Args:
            is_wanted: asked a few times a second meanwhile; no longer: it fails at once.

        Raises:
            IndexerError: refused, or nobody there. Call `release` then.
        """
        request = pb.OpenSessionRequest(
            worker=self._request.worker,
            geometry=geometry_message(self._request.geometry),
            layout=layout_message(self._request.geometry),
            placement=self._request.placement,
            signalling=_SIGNALLING[self._request.settings.signalling],
            engine=self._request.settings.engine,
            required_configuration_hash=self._request.configuration_hash,
        )
        opened = self.control_plane.open_session(request)
        self.session_id, self.epoch = opened.session_id, opened.epoch
        self.lease_seconds = opened.lease_seconds
        self.reasons = tuple(opened.reasons)
        self.remote_traces = RemoteTraces(self._request.geometry, self.epoch)
        self.bank.start(self.epoch)
        self.bells = self.bank.control.bells
        try:
            check_opened(request, opened)
            self.engine = opened.configuration.engine
            self.placement = placement_name(opened.placement)
            self._register(self._connect(opened), is_wanted)
        except (AttachRefused, DescriptorRefused) as error:
            # Nothing is mapped yet: the session need not live on until its lease ends.
            self._close_session()
            raise AttachRefused(str(error)) from error
        self.plans = self._plan_channel(opened.signalling)
        self._resources.callback(self.plans.close)
        logger.info("epoch %d: attached: %s", self.epoch, " ".join(self.reasons))

    def _connect(self, opened: pb.OpenSessionResponse) -> DescriptorConnection:
        path = socket_path(self.control_plane.address)
        if path is None or not opened.descriptor_socket:
            raise AttachRefused(
                f"address: {self.control_plane.address} cannot carry host memory (fix: the "
                "service's Unix socket)"
            )
        connection = DescriptorConnection(
            str(Path(path).parent / opened.descriptor_socket), opened.descriptor_nonce
        )
        self._resources.callback(connection.close)
        self.watch = ProcessWatch(connection.peer.pid)
        return connection

    def _register(self, connection: DescriptorConnection, is_wanted: Callable[[], bool]) -> None:
        connection.send(WAKE_SERVICE_TOKEN, self.wake_service.fileno())
        connection.send(WAKE_WORKER_TOKEN, self.wake_worker.fileno())
        tokens: dict[int, int] = {}

        def region(name: str, memory: SharedMemory, spec: TensorSpec, offset: int = 0) -> pb.Region:
            if isinstance(memory, CudaMemory):
                return cuda_region(name, memory.export, spec, offset)
            assert isinstance(memory, HostMemory)
            if id(memory) not in tokens:
                tokens[id(memory)] = FIRST_REGION_TOKEN + len(tokens)
                connection.send(tokens[id(memory)], memory.fileno())
            return host_region(name, tokens[id(memory)], spec, offset=offset)

        memories: dict[str, SharedMemory] = dict(self.bank.memories)
        if self._request.flags is not None:
            memories[FLAGS] = self._request.flags
        regions = [
            region(name, memory, TensorSpec((memory.byte_size,), DTYPES["UINT8"]))
            for name, memory in memories.items()
        ]
        regions += [
            region(k_cache_region(layer), cache.memory, cache.spec, cache.offset)
            for layer, cache in self._request.k_caches.items()
        ]
        registering = Registering(
            self.keep_alive,
            lease_seconds=self.lease_seconds,
            silent_seconds=self._request.settings.rpc_timeout_seconds,
            is_wanted=is_wanted,
        )
        request = pb.RegisterRegionsRequest(
            session_id=self.session_id, epoch=self.epoch, regions=regions
        )
        self._perhaps_exposed = True
        try:
            self.control_plane.register_regions(request, registering.look)
        except REFUSALS:
            self._perhaps_exposed = False
            raise
        self._exposed = True

    def _plan_channel(self, signalling: pb.Signalling) -> PlanChannel:
        if signalling == pb.SIGNALLING_STREAM:
            return StreamPlans(self.control_plane, self.session_id)
        return RingPlans(self.bank.control, self.wake_service)

    def keep_alive(self) -> None:
        """Renew the lease. Raises IndexerError."""
        self.control_plane.keep_alive(
            pb.KeepAliveRequest(session_id=self.session_id, epoch=self.epoch)
        )

    def select_top_k(self, plan: pb.StepPlan) -> pb.StepReport:
        """Have one staged layer answered by a call. Raises IndexerError."""
        return self.control_plane.select_top_k(
            pb.SelectTopKRequest(session_id=self.session_id, plan=plan)
        ).report

    def detach(self, reason: str) -> None:
        """End the attachment for good; quick, never blocks. The service stops when it sees it."""
        if not self.detached_because:
            logger.warning("epoch %d: detached, working inline: %s", self.epoch, reason)
            self._detach(reason)
            self._on_detached()

    def _detach(self, reason: str) -> None:
        self.detached_because = reason
        self.bells.detach()
        self.wake_service.ring()

    def release(self, pool: BankPool) -> None:
        """Let go of everything after `detach` or a failed `open`, and retire the bank."""
        self._resources.close()
        if self._exposed:
            pool.retire(self.bank, self.watch, self._export_lost)
            return
        self.watch.close()
        if self._perhaps_exposed:
            pool.replace(self.bank)
        else:
            pool.give_back(self.bank)

    def _export_lost(self) -> None:
        self._on_lost_stamps(self.remote_traces.export(self.bank.control))

    def _close_session(self) -> None:
        with suppress(IndexerError):
            self.control_plane.close_session(
                pb.CloseSessionRequest(session_id=self.session_id, epoch=self.epoch)
            )

    def close(self, pool: BankPool) -> None:
        """End in good order: the service drains first, so the bank is free at once."""
        self._close_session()
        self._detach("closed")
        self.release(pool)


def worker_identity(instance: str, model: str = "target", engine: str = "") -> pb.Worker:
    """The worker as OpenSession names it."""
    return pb.Worker(instance=instance, model=model, engine=engine, pid=os.getpid())
