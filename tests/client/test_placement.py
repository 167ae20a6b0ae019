"""Where the service works: what a worker asks for, shares and accepts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import AttachRefused, Session, Source
from indexer_client.agreement import check_opened
from indexer_client.attachment import Attachment, AttachRequest, worker_identity
from indexer_client.control_plane import ControlPlane
from indexer_service.engine import EngineSettings, create_engine
from indexer_service.settings import Settings
from ipc_handoff.banks import ANSWERS, BANK_REGIONS, CONTROL, STAGING, BankPool
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.regions import SharedTensor
from tests.service.support import GEOMETRY, LocalService
from tests.service.support import running as service_running
from tests.support.fake_cuda import Machine, Process, running_as
from tests.support.plants import patient_client
from tests.support.workloads import Checker, RandomSteps, Shape

AUTO, CPU = pb.PLACEMENT_UNSPECIFIED, pb.PLACEMENT_CPU
MPS, PEER, SLICE = pb.PLACEMENT_MPS, pb.PLACEMENT_PEER_GPU, pb.PLACEMENT_TIMESLICE


def accepts(asked: int, gpu_uuid: str, found: int) -> str:
    """Why an answer is refused; empty if it is accepted."""
    request = pb.OpenSessionRequest(placement=asked, worker=pb.Worker(gpu_uuid=gpu_uuid))
    try:
        check_opened(request, pb.OpenSessionResponse(placement=found))
    except AttachRefused as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("asked", "gpu_uuid", "good"),
    [
        (AUTO, "", {CPU}),
        (CPU, "", {CPU}),
        (AUTO, "GPU-1", {MPS, PEER, SLICE}),
        (MPS, "GPU-1", {MPS}),
        (PEER, "GPU-1", {PEER}),
        (SLICE, "GPU-1", {SLICE}),
    ],
)
def test_only_what_was_asked_for_or_the_memory_is_good_for(
    asked: int, gpu_uuid: str, good: set[int]
) -> None:
    for found in (AUTO, CPU, MPS, PEER, SLICE):
        refusal = accepts(asked, gpu_uuid, found)
        assert (not refusal) == (found in good), (found, refusal)
        if refusal:
            assert refusal.startswith(f"placement: the service has {pb.Placement.Name(found)}, ")
            assert "(fix: " in refusal


def test_a_placement_of_a_later_contract_is_refused_by_number() -> None:
    assert accepts(AUTO, "GPU-1", 77).startswith("placement: the service has 77, ")


@pytest.mark.parametrize(
    ("placement", "words"),
    [("inline", "inline was asked for"), ("mps", "this session shares host memory")],
)
def test_a_session_that_wants_no_such_service_never_looks_for_one(
    placement: str, words: str, tmp_path: Path
) -> None:
    steps, checker = RandomSteps(Shape(), 1), Checker()
    settings = patient_client(f"unix:{tmp_path}/d/i.sock", placement=placement)
    with (
        service_running(Settings(address=settings.address)) as service,
        Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session,
    ):
        with pytest.raises(AttachRefused, match=rf"placement: .*{words}.*\(fix: "):
            session.wait_attached(0.1)
        case = steps.case(1)
        with session.step(case.inputs, case.layers) as step:
            checker.run(step, case)
        assert set(checker.last) == {Source.INLINE}
        assert not service.status().sessions
    checker.assert_right()
    steps.close()


# What a worker on a GPU shares.


@pytest.fixture
def here() -> Iterator[Process]:
    with running_as(Process(Machine(mps=True), 200)) as process:
        yield process


def gpu_service(address: str) -> AbstractContextManager[LocalService]:
    """On a GPU that is a fake: no step is computed there."""
    engine = create_engine("auto", EngineSettings(1 << 20, 1))
    return service_running(Settings(address=address, device="cuda:0"), engine=engine)


def test_memory_is_registered_as_what_it_is(
    here: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory by descriptor, device memory by handle, a K cache where it lies."""
    asked: list[pb.RegisterRegionsRequest] = []
    monkeypatch.setattr(ControlPlane, "register_regions", lambda *given: asked.append(given[1]))
    tensors = {layer: here.tensor((8, 32, 132), offset=132 * layer) for layer in GEOMETRY.layers}
    settings = patient_client(f"unix:{tmp_path}/d/i.sock")
    worker = worker_identity("on a GPU")
    worker.gpu_uuid = here.machine.uuid(0)
    request = AttachRequest(
        settings=settings,
        worker=worker,
        geometry=GEOMETRY,
        k_caches={layer: SharedTensor.of_cuda(tensor) for layer, tensor in tensors.items()},
        configuration_hash="",
        tracing=None,
        placement=MPS,
    )
    pool = BankPool(lambda number: DeviceBank(GEOMETRY, number, 0, 0), 1)
    bank = pool.take()
    assert bank is not None
    with gpu_service(settings.address) as service:
        attachment = Attachment(request, bank, lambda: None, lambda steps: None)
        attachment.open()
        (session,) = service.status().sessions
        assert session.placement == MPS
        assert session.worker.gpu_uuid == worker.gpu_uuid
        assert any("mps" in reason for reason in attachment.reasons)
        attachment.close(pool)
    (registered,) = asked
    regions = {region.name: region for region in registered.regions}
    assert set(regions) == {*BANK_REGIONS, "k_cache/3", "k_cache/7"}
    assert regions[CONTROL].WhichOneof("memory") == "host"
    for name in (STAGING, ANSWERS):
        memory = bank.memories[name]
        assert isinstance(memory, CudaMemory)
        assert regions[name].cuda_ipc.handle == memory.export.handle
        assert regions[name].byte_size == memory.byte_size
    for layer in GEOMETRY.layers:
        region = regions[f"k_cache/{layer}"]
        assert region.cuda_ipc.offset == 132 * layer
        assert list(region.shape) == [8, 32, 132]
    pool.close()


def test_a_service_that_cannot_have_the_placement_is_refused(here: Process, tmp_path: Path) -> None:
    settings = patient_client(f"unix:{tmp_path}/d/i.sock")
    here.machine.mps = False
    worker = worker_identity("on a GPU")
    worker.gpu_uuid = here.machine.uuid(0)
    request = AttachRequest(settings, worker, GEOMETRY, {}, "", None, placement=MPS)
    pool = BankPool(lambda number: DeviceBank(GEOMETRY, number, 0, 0), 1)
    bank = pool.take()
    assert bank is not None
    with gpu_service(settings.address):
        attachment = Attachment(request, bank, lambda: None, lambda steps: None)
        with pytest.raises(Exception, match=r"placement: PLACEMENT_MPS, .*\(fix: "):
            attachment.open()
        attachment.release(pool)
    assert pool.take() is bank
    pool.close()
