"""Device memory of a session on a GPU, in a running service, against a stand-in for the driver."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.engine import EngineSettings, create_engine
from indexer_service.session_regions import SessionRegions
from indexer_service.settings import Settings
from ipc_handoff.banks import ANSWERS, BANK_REGIONS, CONTROL, STAGING, k_cache_region
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.descriptors import FIRST_REGION_TOKEN
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.regions import SharedTensor, TensorSpec
from ipc_handoff.wire import cuda_region, host_region
from tests.service.support import (
    GEOMETRY,
    LocalService,
    Worker,
    open_request,
    refused,
    running,
)
from tests.support.fake_cuda import Machine, Process, running_as
from tests.support.waiting import eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION
CACHE = (8, 32, 132)
LAYOUT = GEOMETRY.device


class GpuWorker(Worker):
    """A worker process on a GPU, whose memory is made as that process makes it."""

    def __init__(self, service: LocalService, process: Process, gpu: int = 0, **fields: Any):
        self.process = process
        self._tokens = count(FIRST_REGION_TOKEN)
        worker = pb.Worker(instance=f"worker-{id(self)}", gpu_uuid=process.machine.uuid(gpu))
        super().__init__(service, **({"worker": worker} | fields))
        self.bank.close()
        staging = 0 if self.session.placement == pb.PLACEMENT_PEER_GPU else gpu
        with running_as(process):
            self.device_bank = DeviceBank(GEOMETRY, 0, staging, gpu)
            self.device_bank.start(self.epoch)
            self.caches = {}
            for layer in GEOMETRY.layers:
                tensor = process.tensor(CACHE, offset=132 * layer)
                tensor.data.fill_(layer)
                self.caches[layer] = SharedTensor.of_cuda(tensor, k_cache_region(layer))

    def regions(self) -> dict[str, pb.Region]:
        """Everything that a step needs; the control block's descriptor is sent."""
        found = {}
        for name in BANK_REGIONS:
            memory = self.device_bank.memories[name]
            spec = TensorSpec((memory.byte_size,), torch.uint8)
            if isinstance(memory, CudaMemory):
                found[name] = cuda_region(name, memory.export, spec)
            else:
                token = next(self._tokens)
                self.send(token, memory)  # type: ignore[arg-type]
                found[name] = host_region(name, token, spec)
        for layer, cache in self.caches.items():
            name = k_cache_region(layer)
            assert isinstance(cache.memory, CudaMemory)
            found[name] = cuda_region(name, cache.memory.export, cache.spec)
        return found

    @property
    def mapped(self) -> SessionRegions:
        """What the service has of this session."""
        table = self.service.service._table
        assert table is not None
        (session,) = [session for session in table.sessions if session.id == self.id]
        return session.regions


@pytest.fixture
def here() -> Iterator[Process]:
    with running_as(Process(Machine(mps=True), 200)) as process:
        yield process


@pytest.fixture
def service(here: Process, tmp_path: Path) -> Iterator[LocalService]:
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock", device="cuda:0")
    # Steps are computed nowhere here: the GPU is a fake.
    engine = create_engine("auto", EngineSettings(1 << 20, 1))
    with running(settings, engine=engine) as service:
        yield service


@pytest.fixture
def worker(here: Process, service: LocalService) -> Iterator[GpuWorker]:
    worker = GpuWorker(service, Process(here.machine, 100))
    yield worker
    worker.leave()


def all_bytes(process: Process, address: int, size: int) -> torch.Tensor:
    return process.bytes_at(address, size)


def test_the_service_says_which_gpu_it_is_on(service: LocalService, here: Process) -> None:
    assert service.status().gpu_uuid == here.machine.uuid(0)


def test_a_session_needs_two_slots(service: LocalService, here: Process) -> None:
    worker = pb.Worker(instance="one slot", gpu_uuid=here.machine.uuid(0))
    opens = service.stub().OpenSession
    with refused(INVALID, "layout.slots", "2 to"):
        opens(open_request(replace(GEOMETRY, slots=1), worker=worker))
    assert opens(open_request(replace(GEOMETRY, slots=2), worker=worker)).session_id


def test_a_bank_and_caches_are_mapped_and_shown_where_they_are(
    worker: GpuWorker, here: Process
) -> None:
    assert worker.session.placement == pb.PLACEMENT_MPS
    mapped_bytes = worker.register(*worker.regions().values())
    device_bytes = LAYOUT.staging_size + LAYOUT.answers_size + 2 * 8 * 32 * 132
    assert mapped_bytes == device_bytes + GEOMETRY.control.size
    views = worker.mapped.device_views()
    assert views is not None
    for address, size, memory in (
        (views.staging_address, LAYOUT.staging_size, worker.device_bank.staging_address),
        (views.answers_address, LAYOUT.answers_size, worker.device_bank.answers_address),
    ):
        all_bytes(worker.process, memory, size).fill_(size % 251)
        assert bool((all_bytes(here, address, size) == size % 251).all())
    for layer in GEOMETRY.layers:
        cache = worker.mapped.k_cache(layer)
        assert cache is not None
        assert cache.shape == CACHE
        assert bool((cache == layer).all())
    assert worker.mapped.control().bells.published() == 0
    assert here.opened == 4


def test_a_closed_session_unmaps_and_the_same_memory_can_be_registered_again(
    worker: GpuWorker, here: Process
) -> None:
    worker.register(*worker.regions().values())
    worker.unregister("k_cache/3")
    assert (here.opened, here.closed) == (4, 1)
    assert worker.register(worker.regions()["k_cache/3"])
    worker.close()
    assert (here.opened, here.closed) == (5, 5)
    assert not here.memories


def test_peers_have_answers_on_the_workers_gpu_and_the_rest_on_the_service_s(
    here: Process, service: LocalService
) -> None:
    worker = GpuWorker(service, Process(here.machine, 100), gpu=1)
    assert worker.session.placement == pb.PLACEMENT_PEER_GPU
    regions = worker.regions()
    assert regions[ANSWERS].cuda_ipc.gpu_uuid == here.machine.uuid(1)
    assert regions[STAGING].cuda_ipc.gpu_uuid == here.machine.uuid(0)
    worker.register(*regions.values())
    assert worker.mapped.device_views() is not None
    worker.leave()


CASES: dict[str, tuple[str, dict[str, Any], grpc.StatusCode, str]] = {
    "no handle": (STAGING, {"handle": b""}, INVALID, "staging.cuda_ipc.handle"),
    "a short handle": ("k_cache/7", {"handle": b"x" * 63}, INVALID, "k_cache/7.cuda_ipc.handle"),
    "nobody's handle": (ANSWERS, {"handle": bytes(64)}, FAILED, "answers.cuda_ipc.handle"),
    "no number": (STAGING, {"allocation": 0}, INVALID, "staging.cuda_ipc.allocation"),
    "no GPU": (STAGING, {"gpu_uuid": ""}, INVALID, "staging.cuda_ipc.gpu_uuid"),
    "another GPU": (
        "k_cache/3",
        {"gpu_uuid": "GPU-00000000-0000-0000-0000-000000000002"},
        FAILED,
        "k_cache/3.cuda_ipc.gpu_uuid",
    ),
    "an offset off the line": (STAGING, {"offset": 64}, INVALID, "staging.cuda_ipc.offset"),
    "an offset beyond": (ANSWERS, {"offset": 128}, INVALID, "answers.byte_size"),
    "an offset of 64 bit": (ANSWERS, {"offset": 2**64 - 128}, INVALID, "answers.byte_size"),
    "a cache off its scales": ("k_cache/3", {"offset": 2}, INVALID, "k_cache/3.cuda_ipc.offset"),
    "too many bytes": (ANSWERS, {"byte_size": 1 << 40}, INVALID, "answers.byte_size"),
    "no bytes": (ANSWERS, {"byte_size": 0}, INVALID, "answers.byte_size"),
    "fewer bytes than its shape": (STAGING, {"byte_size": 512}, INVALID, "staging.byte_size"),
    "the host's size": (STAGING, {"shape": GEOMETRY.staging.size}, INVALID, "staging.shape"),
    "too small answers": (ANSWERS, {"shape": LAYOUT.answers_size - 1}, INVALID, "answers.shape"),
    "a control block on the GPU": (CONTROL, {"handle": b"x" * 64}, INVALID, "control.cuda_ipc"),
    "a cache in host memory": ("k_cache/3", {"token": 40}, FAILED, "k_cache/3.host"),
    "staging in host memory": (STAGING, {"token": 40}, FAILED, "staging.host"),
}


def all_are_closed(process: Process) -> bool:
    """A refusal's own traceback may hold a region for a moment longer, and in a circle."""
    gc.collect()
    return process.opened == process.closed


@pytest.mark.parametrize("case", CASES)
def test_refused_and_nothing_stays_open(case: str, worker: GpuWorker, here: Process) -> None:
    name, fields, code, field = CASES[case]
    regions = worker.regions()
    region = regions[name]
    for key, value in fields.items():
        if key == "shape":
            del region.shape[:]
            region.shape.append(value)
        elif key == "token":
            region.host.token = value
        elif key == "byte_size":
            region.byte_size = value
        else:
            setattr(region.cuda_ipc, key, value)
    with refused(code, field):
        worker.register(*regions.values())
    assert worker.service.status().mapped_bytes == 0
    assert eventually(lambda: all_are_closed(here))
    # The session is unharmed, and so is the next CUDA call.
    assert worker.register(*worker.regions().values())


def test_memory_that_says_another_gpu_than_it_lies_on_is_refused(
    worker: GpuWorker, here: Process
) -> None:
    """The UUID that was agreed, on memory that is elsewhere."""
    with running_as(worker.process):
        memory = CudaMemory.allocate(LAYOUT.answers_size, 1, "elsewhere")
    export = replace(memory.export, gpu_uuid=here.machine.uuid(0))
    spec = TensorSpec((memory.byte_size,), torch.uint8)
    with refused(FAILED, "answers.cuda_ipc.gpu_uuid", "lies on device 1"):
        worker.register(cuda_region(ANSWERS, export, spec))
    assert eventually(lambda: all_are_closed(here))
    assert here.opened == 1


def test_a_handle_that_is_open_for_an_earlier_allocation_is_refused(worker: GpuWorker) -> None:
    """A worker that freed a K cache that the service still has, and got its address again."""
    worker.register(*worker.regions().values())
    later = worker.regions()["k_cache/3"]
    later.name = "k_cache/7"
    later.cuda_ipc.allocation += 1000
    worker.unregister("k_cache/7")
    with refused(FAILED, "k_cache/7.cuda_ipc.handle", "unregister the earlier region first"):
        worker.register(later)
    worker.unregister("k_cache/3")
    assert worker.register(later)


def test_two_sessions_with_equal_handles_are_kept_apart(
    worker: GpuWorker, here: Process, service: LocalService
) -> None:
    """Process ids come round: another worker's handle may have the same bytes."""
    worker.register(*worker.regions().values())
    twin = GpuWorker(service, Process(here.machine, 101))
    equal = worker.regions()[STAGING]
    with refused(FAILED, "staging.cuda_ipc.handle", "open for another allocation"):
        twin.register(equal)
    worker.close()
    assert twin.register(equal)
    twin.leave()


def test_worker_and_service_in_one_process_share_without_handles(
    here: Process, service: LocalService
) -> None:
    worker = GpuWorker(service, here)
    worker.register(*worker.regions().values())
    views = worker.mapped.device_views()
    assert views is not None
    assert views.staging_address == worker.device_bank.staging_address
    assert here.opened == 0
    worker.leave()
