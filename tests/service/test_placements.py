"""Which placement a session gets, and why: honoured or refused, never exchanged."""

from collections.abc import Iterator

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.devices import (
    CPU,
    MOST_GATE_SECONDS,
    ServiceDevice,
    check_gate_bound,
    service_device,
)
from indexer_service.errors import ServiceError, StartError
from indexer_service.placements import agree_placement
from indexer_service.server import Service
from indexer_service.settings import Settings
from tests.support.fake_cuda import Machine, Process, running_as

AUTO, CPU_ONLY = pb.PLACEMENT_UNSPECIFIED, pb.PLACEMENT_CPU
MPS, PEER, SLICE = pb.PLACEMENT_MPS, pb.PLACEMENT_PEER_GPU, pb.PLACEMENT_TIMESLICE
FAILED = grpc.StatusCode.FAILED_PRECONDITION
# Of the worker: the service is on GPU 0 of three; GPU 1 is its peer, GPU 2 is not.
SAME, PEERS, APART = 0, 1, 2


@pytest.fixture
def here() -> Iterator[Process]:
    with running_as(Process(Machine(gpus=3), 200, visible=(0, 1, 2))) as process:
        yield process


def request(wanted: int, gpu_uuid: str) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(placement=wanted, worker=pb.Worker(gpu_uuid=gpu_uuid))


def agreed(here: Process, wanted: int, gpu: int, mps: bool) -> tuple[pb.Placement, str]:
    here.machine.mps = mps
    return agree_placement(request(wanted, here.machine.uuid(gpu)), service_device("cuda:0"))


@pytest.mark.parametrize(
    ("wanted", "gpu", "mps", "placement", "why"),
    [
        (AUTO, SAME, True, MPS, "placement mps: the worker's GPU, and MPS is running there"),
        (AUTO, PEERS, True, PEER, "placement peer_gpu: the worker is on another GPU"),
        (MPS, SAME, True, MPS, "placement mps: "),
        (PEER, PEERS, False, PEER, "placement peer_gpu: asked for"),
        (SLICE, SAME, False, SLICE, "placement timeslice: asked for"),
        (SLICE, SAME, True, SLICE, "placement timeslice: asked for"),
    ],
)
def test_honoured(
    wanted: int, gpu: int, mps: bool, placement: pb.Placement, why: str, here: Process
) -> None:
    found, reason = agreed(here, wanted, gpu, mps)
    assert (found, reason[: len(why)]) == (placement, why)


@pytest.mark.parametrize(
    ("wanted", "gpu", "mps", "field", "parts"),
    [
        (MPS, SAME, False, "placement", ("does not run under MPS", "nvidia-cuda-mps-control")),
        (AUTO, SAME, False, "placement", ("does not run under MPS", "nvidia-cuda-mps-control")),
        (PEER, SAME, True, "placement", ("on one GPU", "PLACEMENT_MPS")),
        (MPS, PEERS, True, "placement", ("PLACEMENT_MPS, but the worker is on", "PEER_GPU")),
        (SLICE, PEERS, True, "placement", ("PLACEMENT_TIMESLICE, but", "PEER_GPU")),
        (AUTO, APART, True, "worker.gpu_uuid", ("is no peer of", "NVLink")),
        (PEER, APART, True, "worker.gpu_uuid", ("is no peer of", "NVLink")),
        (CPU_ONLY, SAME, True, "placement", ("PLACEMENT_CPU", "a service on the CPU")),
    ],
)
def test_refused(
    wanted: int, gpu: int, mps: bool, field: str, parts: tuple[str, str], here: Process
) -> None:
    with pytest.raises(ServiceError) as caught:
        agreed(here, wanted, gpu, mps)
    text = str(caught.value)
    assert caught.value.code == FAILED
    assert text.startswith(f"{field}: "), text
    assert "(fix: " in text
    assert all(part in text for part in parts), text


def test_a_gpu_that_the_service_does_not_see_is_refused_with_the_variable(here: Process) -> None:
    here.visible = (0,)
    with pytest.raises(ServiceError, match=r"worker\.gpu_uuid: .*CUDA_VISIBLE_DEVICES") as caught:
        agreed(here, AUTO, PEERS, False)
    assert caught.value.code == FAILED


def test_access_one_way_is_not_enough(here: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        here, "cuDeviceCanAccessPeer", lambda a, b: (0, int((a, b) == (0, 1))), raising=False
    )
    with pytest.raises(ServiceError, match="is no peer of"):
        agreed(here, PEER, PEERS, False)


def test_a_worker_on_the_cpu_is_refused_by_a_service_on_a_gpu(here: Process) -> None:
    with pytest.raises(ServiceError, match=r"worker\.gpu_uuid: is empty") as caught:
        agree_placement(request(AUTO, ""), service_device("cuda:0"))
    assert caught.value.code == FAILED


def test_a_service_on_the_cpu_knows_no_gpu() -> None:
    placement, why = agree_placement(request(AUTO, ""), CPU)
    assert (placement, why) == (CPU_ONLY, "placement cpu: this service runs on the CPU")
    for refused, field in ((request(MPS, ""), "placement"), (request(AUTO, "GPU-1"), "worker.gpu")):
        with pytest.raises(ServiceError, match=field) as caught:
            agree_placement(refused, CPU)
        assert caught.value.code == FAILED


# The device itself.


def test_the_setting_names_the_device(here: Process) -> None:
    assert service_device("cpu") == CPU
    assert service_device("cuda") == service_device("auto") == service_device("cuda:0")
    two = service_device("cuda:2")
    assert two == ServiceDevice(2, here.machine.uuid(2))
    assert (str(two.torch_device), str(CPU.torch_device)) == ("cuda:2", "cpu")
    with pytest.raises(StartError, match=r"device: 3 is not a GPU.*\(fix: "):
        service_device("cuda:3")
    here.visible = ()
    assert service_device("auto") == CPU


def test_a_gate_on_a_gpu_ends_before_its_bank_is_used_again(here: Process) -> None:
    check_gate_bound(CPU, 60.0)
    check_gate_bound(service_device("cuda"), MOST_GATE_SECONDS)
    with pytest.raises(StartError, match=r"gate_bound_seconds: 2.0 on a GPU \(fix: 1.5 at most"):
        check_gate_bound(service_device("cuda"), 2.0)
    settings = Settings(address="unix:/nowhere/i.sock", device="cuda", gate_bound_seconds=2.0)
    with pytest.raises(StartError, match="gate_bound_seconds"):
        Service(settings)
