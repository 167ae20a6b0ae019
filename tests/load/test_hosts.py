"""Where a load test runs, and which service it starts for that."""

import os
from pathlib import Path
from typing import Any

import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.gpu_facts import Gpu, GpuFacts
from dsa_indexer_cli.load import host as load_host
from dsa_indexer_cli.load.host import host_of
from dsa_indexer_cli.load.host_worker import HostWorker
from dsa_indexer_cli.load.workload import Load, WorkloadError
from tests.load.gpu_workloads import UUID


def facts(count: int) -> GpuFacts:
    """GPUs that all reach each other, without MPS."""
    ordinals = range(count)
    return GpuFacts(
        (13, 0),
        tuple(
            Gpu(n, f"GPU-{n}", f"Fake GPU {n}", (9, 0), 1 << 37, False,
                tuple(other for other in ordinals if other != n))
            for n in ordinals
        ),
    )  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that reach each other, without MPS."""
    monkeypatch.setattr(load_host, "may_have_gpus", lambda: True)
    monkeypatch.setattr(load_host, "look", lambda: facts(2))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Devices of services that were started, and the MPS daemon that they saw."""
    found: list[tuple[str, str | None]] = []

    class Service:
        def __init__(self, address: str, traces: None, log: Path, *, device: str) -> None:
            found.append((device, os.environ.get("CUDA_MPS_PIPE_DIRECTORY")))

        def start(self, seconds: float) -> None: ...
        def stop(self) -> int:
            return 0

        def kill(self) -> None: ...

    class Daemon:
        def __init__(self, folder: Path) -> None:
            self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}

        def __enter__(self) -> dict[str, str]:
            return self.variables

        def __exit__(self, *_: object) -> None: ...

    status = pb.GetStatusResponse(serving=True, gpu_uuid=UUID)
    monkeypatch.setattr(load_host, "ServiceProcess", Service)
    monkeypatch.setattr(load_host, "mps_daemon", Daemon)
    monkeypatch.setattr(load_host, "status_of", lambda address: status)
    return found


@pytest.mark.parametrize(
    ("placement", "device", "own_daemon"),
    [
        ("auto", "cuda:0", False),
        ("timeslice", "cuda:0", False),
        ("mps", "cuda:0", True),
        ("peer_gpu", "cuda:1", False),
        ("cpu", "cpu", False),
    ],
)
def test_a_service_of_its_own_is_where_the_placement_wants_it(
    placement: Any, device: str, own_daemon: bool, gpus: None,
    started: list[tuple[str, str | None]],
) -> None:  # fmt: skip
    with host_of(Load(placement=placement), None, lambda _: None) as host:
        assert host.make_worker is (HostWorker if device == "cpu" else load_host.on_gpu)
        assert bool(host.environment) == own_daemon
        assert host.gpu == ("" if device == "cpu" else "Fake GPU 0")
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ, "another test's sessions would have it"
    ((found, daemon),) = started
    assert found == device
    assert (daemon is not None) == own_daemon


def test_without_a_service_it_is_the_gpu_alone(gpus: None) -> None:
    with host_of(Load(placement="inline"), "unix:/x", lambda _: None) as host:
        assert (host.address, host.gpu) == ("", "Fake GPU 0")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"placement": "mps", "device": 2}, r"load\.device: 2, and 2 GPUs are visible \(fix: "),
        ({"device": 5}, r"load\.device: 5"),
    ],
    ids=["asked", "auto"],
)
def test_a_gpu_that_is_not_there(load: dict[str, Any], said: str, gpus: None) -> None:
    with pytest.raises(WorkloadError, match=said), host_of(Load(**load), None, lambda _: None):
        pass


def test_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_host, "may_have_gpus", lambda: True)
    monkeypatch.setattr(load_host, "look", lambda: facts(1))
    with (
        pytest.raises(RuntimeError, match=r"load\.placement: peer_gpu, but no GPU .*\(fix: "),
        host_of(Load(placement="peer_gpu"), None, lambda _: None),
    ):
        pass


@pytest.mark.parametrize("placement", ["mps", "peer_gpu", "timeslice"])
def test_a_placement_that_a_machine_without_a_gpu_cannot_have(placement: Any) -> None:
    with (
        pytest.raises(RuntimeError, match=r"load\.placement: needs a GPU: "),
        host_of(Load(placement=placement), None, lambda _: None),
    ):
        pass


@pytest.mark.parametrize(
    ("uuid", "placement", "said"),
    [
        ("", "mps", r"load\.placement: mps, but the service .* is on the CPU \(fix: "),
        (UUID, "cpu", r"load\.placement: cpu, but the service .* is on a GPU \(fix: "),
    ],
)
def test_a_running_service_that_is_elsewhere(
    uuid: str, placement: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = pb.GetStatusResponse(serving=True, gpu_uuid=uuid)
    monkeypatch.setattr(load_host, "status_of", lambda address: status)
    with (
        pytest.raises(RuntimeError, match=said),
        host_of(Load(placement=placement), "unix:/x", lambda _: None),
    ):
        pass
