"""What `dsa-indexer doctor` says of hosts with GPUs."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from dsa_indexer_cli import doctor, doctor_gpus, doctor_handoff, doctor_host, doctor_placement
from dsa_indexer_cli.children import ChildFailed
from dsa_indexer_cli.doctor_host import namespace_findings
from dsa_indexer_cli.main import app
from tests.cli.gpu_host import GpuHost, gpu_host

START_MPS = "nvidia-cuda-mps-control -d, before engine and service start"
TWO_GPUS = {"gpus": 2, "reachable": {frozenset((0, 1))}}

Hosts = Callable[..., GpuHost]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield lambda **machine: stack.enter_context(gpu_host(tmp_path, monkeypatch, **machine))


def _wrong(host: GpuHost) -> list[str]:
    return [check for check, finding in host.findings().items() if finding.ok is False]


def _look_fails(patch: pytest.MonkeyPatch, message: str) -> None:
    def look() -> Any:
        raise ChildFailed(message)

    patch.setattr(doctor_placement, "may_have_gpus", lambda: True)
    patch.setattr(doctor_placement, "has_device_files", lambda: True)
    patch.setattr(doctor_placement, "look", look)


# One GPU.


def test_with_mps_the_hand_over_is_measured_and_nothing_is_to_be_changed(host: Hosts) -> None:
    one = host(gpus=1, mps=True)
    found = one.findings()
    assert not _wrong(one)
    assert found["placement"].ok is True
    assert found["placement"].detail.startswith("mps: ")
    assert found["placement"].fix == ""
    assert found["placement"].values == {"placement": "mps", "service_device": 0, "steps": []}
    assert found["hand-over mps"].ok is True
    assert found["hand-over mps"].detail.startswith("3.25 us a layer")
    assert found["hand-over mps"].values["microseconds_a_layer"] == 3.25
    assert one.measured == [(0, 0), (0, 0)]


def test_a_gpu_is_shown_with_its_name_memory_capability_and_uuid(host: Hosts) -> None:
    gpu = host(gpus=1).findings()["GPU 0"]
    assert gpu.ok is True
    assert gpu.detail == "NVIDIA H0, 9.0, 140 GiB, GPU-00000000-0000-0000-0000-000000000001"
    assert gpu.values["memory_bytes"] == 140 << 30
    assert gpu.values["peers"] == []


def test_without_mps_streams_sleep_and_the_daemon_s_command_is_named(host: Hosts) -> None:
    one = host(gpus=1)
    found = one.findings()
    assert found["MPS"].ok is None
    assert f"there is no {one.pipes}/control" in found["MPS"].detail
    assert found["hand-over timeslice"].ok is True
    assert one.measured == [(0, 0)]
    assert found["placement"].ok is True
    assert found["placement"].detail.startswith("timeslice: ")
    (step,) = found["placement"].values["steps"]
    assert step.startswith("mps: ") and START_MPS in step
    assert found["placement"].fix == f"1. {step}"


def test_an_inline_placement_is_a_failure(host: Hosts) -> None:
    """Of this version: it is not one once the host gives a service without MPS."""
    placement = host(gpus=1).findings()["placement"]
    assert (placement.ok is False) == placement.detail.startswith("inline: ")
    assert "(fix: " not in placement.detail


def test_another_user_s_daemon_is_told_apart(host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    one = host(gpus=1)
    one.pipes.mkdir()
    os.mkfifo(one.pipes / "control")
    ours = one.findings()["MPS"]
    assert "does not serve this process" in ours.detail
    owner = os.getuid() or 1000
    if owner != os.getuid():
        os.chown(one.pipes / "control", owner, -1)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    found = one.findings()["MPS"]
    assert f"user {owner}'s, and a daemon serves its own user only" in found.detail
    assert f"export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-{owner + 1} " in found.fix
    assert found.values["owner"] == owner


def test_a_gpu_older_than_the_kernels_is_a_failure(host: Hosts) -> None:
    one = host(gpus=1, mps=True)
    one.process.capability = (7, 5)
    assert _wrong(one) == ["GPU 0"]
    assert "8.0" in one.findings()["GPU 0"].fix
    assert not one.measured


# Two GPUs.


def test_two_gpus_that_reach_each_other_need_no_mps(host: Hosts) -> None:
    two = host(**TWO_GPUS)
    found = two.findings()
    assert not _wrong(two)
    assert found["peer access"].detail == "between GPUs 0-1"
    assert found["placement"].detail.startswith("peer_gpu: ")
    assert found["placement"].values["service_device"] == 1
    assert "dsa-indexer serve --device cuda:1" in found["placement"].fix
    assert found["hand-over peer_gpu"].ok is True
    assert set(two.measured) == {(0, 0), (0, 1)}


def test_two_gpus_and_mps_are_both_measured_and_mps_comes_first(host: Hosts) -> None:
    two = host(mps=True, **TWO_GPUS)
    found = two.findings()
    assert two.measured == [(0, 0), (0, 1)]
    assert found["placement"].detail.startswith("mps: ")
    (step,) = found["placement"].values["steps"]
    assert step.startswith("peer_gpu, where GPU 1 can be the service's own: ")


def test_two_gpus_without_a_way_to_each_other_are_as_one(host: Hosts) -> None:
    two = host(gpus=2, reachable=set())
    found = two.findings()
    assert found["peer access"].ok is None
    assert "nvidia-smi topo -p2p r" in found["peer access"].fix
    assert "GPU 1" in found
    assert two.measured == [(0, 0)]
    assert found["placement"].detail.startswith("timeslice: ")
    (step,) = found["placement"].values["steps"]
    assert START_MPS in step


def test_a_way_in_one_direction_is_none(host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    two = host(**TWO_GPUS)
    monkeypatch.setattr(two.process, "_reaches", lambda own, other: own <= other)
    assert two.findings()["peer access"].ok is None


def test_the_second_placement_gets_the_time_that_is_left(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = host(mps=True, **TWO_GPUS)
    monkeypatch.setattr(doctor_handoff, "_LEAST_SECONDS", doctor_handoff.PROBE_SECONDS + 1)
    found = two.findings()
    assert found["hand-over peer_gpu"].ok is None
    assert "all the time" in found["hand-over peer_gpu"].detail


# Settings.


def test_blocking_launches_come_first_and_stop_the_measurement(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(gpus=1)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = one.findings()
    assert found["placement"].detail.startswith("inline: ")
    first, second = found["placement"].values["steps"]
    assert first == "unset CUDA_LAUNCH_BLOCKING"
    assert START_MPS in second
    assert found["hand-over"].ok is None
    assert not one.measured


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:64, expandable_segments:True", "max_split_size_mb:64,expandable"),
        ("backend:cudaMallocAsync", "expandable_segments:False"),
    ],
)
def test_an_allocator_whose_memory_cannot_be_exported_is_a_failure(
    host: Hosts, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fix: str
) -> None:
    one = host(gpus=1, mps=True)
    monkeypatch.setenv(variable, value)
    assert _wrong(one) == ["allocator"]
    found = one.findings()
    assert found["allocator"].fix.startswith(f"export {variable}={fix}")
    assert found["placement"].values["steps"] == [found["allocator"].fix]
    assert one.measured


def test_an_allocator_with_other_options_is_right(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(gpus=1, mps=True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,backend:native")
    assert not _wrong(one)


def test_a_missing_triton_is_named_with_the_extra_that_has_it(host: Hosts) -> None:
    one = host(gpus=1, mps=True)
    del one.versions["triton"]
    assert _wrong(one) == ["triton"]
    assert one.findings()["placement"].values["steps"] == ["pip install 'dsa-indexer[gpu]'"]
    assert not one.measured


@pytest.mark.parametrize(("cuda", "says"), [("14.0", "CUDA 14 or newer"), (None, "a build of")])
def test_a_torch_that_the_driver_does_not_run_is_a_failure(
    host: Hosts, monkeypatch: pytest.MonkeyPatch, cuda: str | None, says: str
) -> None:
    one = host(gpus=1, mps=True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert _wrong(one) == ["driver"]
    assert says in one.findings()["driver"].fix
    assert not one.measured


def test_an_older_torch_runs_on_a_newer_driver(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(gpus=1, mps=True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not _wrong(one)


def test_a_failed_measurement_is_a_failure_in_one_line(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(gpus=1, mps=True)

    def fails(*arguments: object, **options: object) -> Any:
        raise ChildFailed("service: staging.handle: cannot be opened (fix: --ipc=host)")

    monkeypatch.setattr(doctor_handoff, "measure", fails)
    assert _wrong(one) == ["hand-over mps"]
    found = one.findings()["hand-over mps"]
    assert found.detail == "service: staging.handle: cannot be opened"
    assert found.fix == "--ipc=host"


# No GPU that can be asked.


def test_a_host_with_nothing_of_a_gpu_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpus, "DEVICE_FILES", (Path("/nonexistent"),))
    monkeypatch.setattr(doctor_gpus, "_version", lambda package: "")
    monkeypatch.setattr(doctor_placement, "look", lambda: pytest.fail("a process"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (placement,) = doctor_placement.placement_findings()
    assert placement.ok is True
    assert placement.detail == "cpu: no GPU is visible here"


def test_hidden_gpus_are_a_cpu_host_with_the_variable_that_hides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _look_fails(monkeypatch, "cuda: cannot be initialised: CUDA_ERROR_NO_DEVICE (fix: a GPU)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (placement,) = doctor_placement.placement_findings()
    assert placement.ok is True
    assert placement.detail == "cpu: no GPU is visible here (CUDA_VISIBLE_DEVICES is '')"


def test_a_package_without_a_driver_is_a_cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    _look_fails(monkeypatch, "cuda: Failed to dlopen libcuda.so.1 (fix: a host with a driver)")
    monkeypatch.setattr(doctor_placement, "has_device_files", lambda: False)
    (placement,) = doctor_placement.placement_findings()
    assert placement.ok is True


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        (
            "cuda: no package cuda-bindings (fix: pip install 'dsa-indexer[gpu]')",
            "pip install 'dsa-indexer[gpu]'",
        ),
        ("cuda: Failed to dlopen libcuda.so.1 (fix: a host with a driver)", "a host with a driver"),
        ("cuda: no: CUDA_ERROR_MPS_CONNECTION_FAILED (fix: a driver)", "another user's: "),
        ("ended with status -11: it said nothing", "nvidia-smi"),
    ],
)
def test_gpus_that_cannot_be_asked_are_a_failure_in_words(
    monkeypatch: pytest.MonkeyPatch, message: str, fix: str
) -> None:
    _look_fails(monkeypatch, message)
    monkeypatch.setattr(doctor, "console", Console(width=900))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert fix in result.output  # Brackets, too.
    gpu, placement = doctor_placement.placement_findings()
    assert gpu.ok is False and placement.ok is False
    assert gpu.fix in placement.fix


# Namespaces.


def test_a_container_s_own_namespaces_are_named_with_the_options_that_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_host, "_NAMESPACES", tmp_path)
    for kind in ("pid", "ipc"):
        (tmp_path / kind).touch()
    pid, ipc = namespace_findings()
    assert "--pid=host" in pid.fix and "--ipc=host" in ipc.fix
    numbers = {kind: (tmp_path / kind).stat().st_ino for kind in ("pid", "ipc")}
    monkeypatch.setattr(doctor_host, "_HOSTS_OWN", numbers)
    assert [finding.detail for finding in namespace_findings()] == ["the host's"] * 2
