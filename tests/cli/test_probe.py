"""The probe that supervisors use: right, and light enough to be run every few seconds."""

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from dsa_indexer_cli import probe
from indexer_service.settings import Settings
from tests.service.support import LocalService, running
from tests.support.waiting import SOON


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d/i.sock"


def test_a_service_that_serves(address: str) -> None:
    with running(Settings(address=address)):
        assert probe.main(["--address", address]) == 0
        assert probe.main(["--address", address, "--live"]) == 0


def test_nobody_is_there(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["--address", address]) == 1
    assert probe.main(["--address", address, "--live"]) == 1
    assert address in capsys.readouterr().err


def test_a_service_that_warms_up_or_shuts_down_is_alive_and_not_ready(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "state", lambda _: "NOT_SERVING")
    assert probe.main(["--address", address]) == 1
    assert probe.main(["--address", address, "--live"]) == 0


def test_it_waits_for_a_service_that_comes(address: str) -> None:
    service = LocalService(Settings(address=address))
    timer = Timer(0.5, service.start)
    began = time.monotonic()
    timer.start()
    assert probe.main(["--address", address, "--wait", str(2 * SOON)]) == 0
    assert 0.5 <= time.monotonic() - began < SOON
    timer.join()
    service.stop()


def test_it_does_not_wait_longer(address: str) -> None:
    began = time.monotonic()
    assert probe.main(["--address", address, "--wait", "0.5"]) == 1
    assert 0.5 <= time.monotonic() - began < SOON


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["--address", "nowhere"]) == 2
    assert "(fix: " in capsys.readouterr().err


def test_as_a_supervisor_runs_it(address: str) -> None:
    with running(Settings(address=address)):
        command = [sys.executable, "-m", "dsa_indexer_cli.probe"]
        environment = {**os.environ, "DSA_INDEXER_ADDRESS": address}
        assert subprocess.run(command, env=environment, timeout=4 * SOON).returncode == 0


def test_it_loads_neither_torch_nor_the_command() -> None:
    program = (
        "import sys, dsa_indexer_cli.probe\n"
        "print(*sorted({'torch', 'typer', 'pydantic', 'indexer_client'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
