"""Which engine a service has, and what none of its sessions may run under."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import torch

from dsa_indexer_cli.serve import DEVICE_LOST_STATUS
from indexer_service.engine import EngineSettings, create_engine
from indexer_service.engines.cpu import CpuEngine
from indexer_service.errors import ServiceError
from indexer_service.settings import Settings
from tests.service.support import open_request, refused, running

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def settings_on(device: torch.device) -> EngineSettings:
    return EngineSettings(1 << 20, 1, device)


@pytest.mark.parametrize("name", ["", "auto", "cpu-reference"])
def test_a_cpu_has_the_reference(name: str) -> None:
    assert isinstance(create_engine(name, settings_on(CPU)), CpuEngine)


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        ("triton", CPU, "'triton' does not run on cpu (fix: auto, cpu-reference"),
        ("cpu-reference", GPU, "'cpu-reference' does not run on cuda:0 (fix: auto, triton"),
        ("abacus", GPU, "'abacus' is not here (fix: auto, triton, cpu-reference)"),
    ],
)
def test_an_engine_that_is_not_for_the_device_is_refused(
    name: str, device: torch.device, says: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        create_engine(name, settings_on(device))
    assert says in str(caught.value)


def test_a_gpu_has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip(
        "indexer_service.engines.triton", reason="Triton exists on Linux only"
    )
    monkeypatch.setenv("DSA_INDEXER_FORCE_ARCH", "90")
    engine = create_engine("auto", settings_on(GPU))
    assert isinstance(engine, triton.TritonEngine)
    assert engine.configuration.engine == "triton"
    assert engine.configuration.settings["architecture"] == "90"


class Refusing(CpuEngine):
    """With the check of sessions that the Triton engine has."""

    def __init__(self) -> None:
        super().__init__(settings_on(CPU))

    def check_session(self) -> None:
        triton = pytest.importorskip(
            "indexer_service.engines.triton", reason="Triton exists on Linux only"
        )
        triton.TritonEngine.check_session(self)


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("0", False), ("", False)])
def test_no_session_where_launches_block(
    value: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock")
    with running(settings, engine=Refusing()) as service:
        if is_refused:
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "CUDA_LAUNCH_BLOCKING"):
                service.stub().OpenSession(open_request())
        else:
            service.stub().OpenSession(open_request())


_LOSES_ITS_GPU = """
import runpy, sys
from indexer_service.server import Service
start = Service.start
async def lost(self):
    await start(self)
    self._note_device_lost()()
Service.start = lost
sys.argv = ["dsa-indexer", "serve", "--address", sys.argv[1]]
runpy.run_module("dsa_indexer_cli", run_name="__main__")
"""


def test_a_lost_gpu_ends_the_process_with_a_status_of_its_own(
    tmp_path: Path, repository: Path
) -> None:
    paths = os.pathsep.join(str(repository / root) for root in (".", "client", "proto"))
    ended = subprocess.run(
        [sys.executable, "-c", _LOSES_ITS_GPU, f"unix:{tmp_path}/d/i.sock"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == DEVICE_LOST_STATUS, ended.stderr[-2000:]
    assert "context is gone" in ended.stderr
    assert not (tmp_path / "d").exists()
