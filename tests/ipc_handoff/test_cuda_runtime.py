"""The CUDA driver's calls: what is missing, what is asked, and which errors name what."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc_handoff import cuda_runtime
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.errors import RegionUnavailable
from tests.support.fake_cuda import CUresult, Machine, Process, running_as


@pytest.fixture
def here() -> Iterator[Process]:
    with running_as(Process(Machine(gpus=3), 200, visible=(2, 0))) as process:
        yield process


def test_a_missing_package_is_named_with_the_extra_that_has_it(here: Process) -> None:
    # Taken back before `here` takes back the module that this replaces.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(RegionUnavailable, match=r"\(fix: pip install 'dsa-indexer\[gpu\]'\)"):
            CudaMemory.allocate(64, 0, "x")
        assert cuda_runtime.device_count() == 0
        assert cuda_runtime.device_of_uuid(here.machine.uuid(0)) is None


def test_a_missing_driver_is_named(here: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> tuple[CUresult]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(here, "cuInit", no_library, raising=False)
    with pytest.raises(RegionUnavailable, match=r"cuda: Failed to dlopen .*\(fix: a host with"):
        CudaMemory.allocate(64, 0, "x")
    assert cuda_runtime.device_count() == 0


def test_a_driver_that_fails_names_its_error(
    here: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = (CUresult.CUDA_ERROR_INVALID_DEVICE,)
    monkeypatch.setattr(here, "cuInit", lambda flags: result, raising=False)
    with pytest.raises(RegionUnavailable, match="cannot be initialised: CUDA_ERROR_INVALID_DEVICE"):
        cuda_runtime.device_uuid(0)


def test_uuids_are_of_the_gpus_that_this_process_sees(here: Process) -> None:
    machine = here.machine
    assert cuda_runtime.device_uuid(0) == "GPU-00000000-0000-0000-0000-000000000003"
    assert cuda_runtime.device_of_uuid(machine.uuid(2)) == 0
    assert cuda_runtime.device_of_uuid(machine.uuid(0)) == 1
    assert cuda_runtime.device_of_uuid(machine.uuid(1)) is None
    with pytest.raises(RegionUnavailable, match=r"device: 2 is not a GPU"):
        cuda_runtime.device_uuid(2)


def test_peers_are_asked_and_refused_with_a_way_to_see_why(here: Process) -> None:
    assert not cuda_runtime.can_access_peer(0, 1)
    with pytest.raises(RegionUnavailable, match=r"device: 0 cannot access 1: .*\(fix: "):
        cuda_runtime.enable_peer_access(0, 1)
    here.machine.reachable.add(frozenset((0, 2)))
    assert cuda_runtime.can_access_peer(0, 1)
    cuda_runtime.enable_peer_access(0, 1)  # already enabled
    assert not here.contexts


@pytest.mark.parametrize("enabled", [False, True])
def test_mps_is_what_the_driver_says(enabled: bool, here: Process) -> None:
    here.machine.mps = enabled
    assert cuda_runtime.runs_under_mps(0) is enabled


@pytest.mark.parametrize("listens", [False, True])
def test_mps_is_a_daemon_s_pipe_where_the_driver_cannot_tell(
    listens: bool, here: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.machine.mps = None
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if listens:
        (tmp_path / "control").touch()
    assert cuda_runtime.runs_under_mps(0) is listens


def test_the_thread_keeps_its_own_context(here: Process) -> None:
    here.contexts.append(1)
    CudaMemory.allocate(64, 0, "x")
    assert here.contexts == [1]
