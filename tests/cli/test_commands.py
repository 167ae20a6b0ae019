"""The command's subcommands, each as users run it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dsa_indexer_cli.doctor import examine
from indexer_client import Session
from indexer_service.settings import Settings
from tests.cli.lines import one_line
from tests.support.plants import patient_client
from tests.support.waiting import SOON
from tests.support.workloads import Checker, RandomSteps, Shape

COMMAND = [str(Path(sys.executable).parent / "dsa-indexer")]
SECONDS = 120


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: v for name, v in os.environ.items() if not name.startswith("DSA_INDEXER_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**clean, **environment},
    )


def _json(*arguments: str, **environment: str) -> Any:
    result = _run(*arguments, "--json", **environment)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d/i.sock"


@pytest.fixture
def served(address: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`dsa-indexer serve` at `address`."""
    with (tmp_path / "log").open("wb") as log:
        command = [*COMMAND, "serve", "--address", address, "--gate-bound-seconds", "30"]
        process = subprocess.Popen(command, stderr=log)
    deadline = time.monotonic() + SECONDS
    while _run("status", "--address", address).returncode:
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
    yield process
    process.kill()
    process.wait()


def test_version_names_what_a_bug_report_needs() -> None:
    found = _json("version")
    assert found["dsa-indexer"] == version("dsa-indexer")
    assert found["torch"] == version("torch")
    assert found["contract"] == "dsa_indexer.v1"
    text = _run("version")
    assert text.returncode == 0
    for name, value in found.items():
        assert name in text.stdout and value in text.stdout


def test_the_version_alone_is_an_option_too() -> None:
    assert _run("--version").stdout.strip() == version("dsa-indexer")


def test_help_names_every_subcommand() -> None:
    result = _run("--help")
    assert result.returncode == 0
    for name in ("serve", "demo", "racelab", "status", "doctor", "trace", "load", "version"):
        assert name in result.stdout


def test_torch_is_not_loaded_before_a_command_runs() -> None:
    """Its import takes seconds, which help and a mistyped option need not."""
    program = "import sys, dsa_indexer_cli.main\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


def test_serve_has_a_flag_for_every_setting_and_says_how_else_to_set_it() -> None:
    result = _run("serve", "--help", COLUMNS="160")
    assert result.returncode == 0
    assert "DSA_INDEXER_LEASE_SECONDS" in result.stdout
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in result.stdout


@pytest.mark.parametrize(
    "name", ["status", "doctor", "version", "demo", "racelab", "trace", "load"]
)
def test_help_of(name: str) -> None:
    result = _run(name, "--help")
    assert result.returncode == 0
    assert "--json" in result.stdout


def test_status_without_a_service_says_what_to_do(address: str) -> None:
    result = _run("status", "--address", address)
    assert result.returncode == 1
    assert "dsa-indexer serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_names_the_placement_and_finds_nothing_to_change(address: str) -> None:
    found = {finding["check"]: finding for finding in _json("doctor", "--address", address)}
    assert all(finding["ok"] is not False for finding in found.values()), found
    assert found["placement"]["ok"] is True
    assert found["service"]["ok"] is None
    assert found["service"]["fix"] == "dsa-indexer serve"
    assert _run("doctor", "--address", address).returncode == 0


def test_doctor_does_not_take_a_filtered_pidfd_for_proof(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    found = {finding.check: finding for finding in examine(address)}
    assert found["proof of death"].ok is False
    assert "pidfd_open" in found["proof of death"].fix


def test_doctor_finds_a_directory_that_others_may_enter(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    result = _run("doctor", "--json", "--address", f"unix:{open_to_all}/i.sock")
    assert result.returncode == 1
    (bad,) = [finding for finding in json.loads(result.stdout) if finding["ok"] is False]
    assert bad["check"] == "socket directory"
    assert f"chmod 700 {open_to_all}" in bad["fix"]


def test_serve_and_status_see_each_other(
    served: subprocess.Popen[bytes], address: str, tmp_path: Path
) -> None:
    idle = _json("status", "--address", address)
    assert idle["serving"] is True
    assert idle["pid"] == served.pid
    assert idle["sessions"] == []
    assert int(idle["mapped_bytes"]) == 0

    steps, checker = RandomSteps(Shape(), 1), Checker()
    settings = patient_client(address)
    with Session(
        steps.geometry, steps.k_caches, steps.fallback, settings=settings, engine_name="a test"
    ) as session:
        session.wait_attached(SOON)
        for number in range(2):
            case = steps.case(number)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
        (busy,) = _json("status", DSA_INDEXER_ADDRESS=address)["sessions"]
        assert busy["worker"]["engine"] == "a test"
        assert busy["worker"]["pid"] == os.getpid()
        assert int(busy["answered_steps"]) == 2
        assert int(busy["mapped_bytes"]) > 0
        text = _run("status", "--address", address)
        assert "a test" in text.stdout and "serving" in text.stdout
        assert _run("doctor", "--address", address).returncode == 0
    checker.assert_right()
    assert _json("status", "--address", address)["sessions"] == []

    served.send_signal(signal.SIGTERM)
    assert served.wait(SECONDS) == 0
    assert not (tmp_path / "d").exists()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_second_service_on_the_address_is_refused_in_one_line(
    served: subprocess.Popen[bytes], address: str
) -> None:
    result = _run("serve", "--address", address, "--log-level", "ERROR")
    assert result.returncode == 2
    line = one_line(result.stderr)
    assert "already runs" in line and "(fix: " in line
    assert served.poll() is None


def test_serve_ends_with_ctrl_c_too(
    served: subprocess.Popen[bytes], address: str, tmp_path: Path
) -> None:
    served.send_signal(signal.SIGINT)
    assert served.wait(SECONDS) == 0
    assert not (tmp_path / "d").exists()
    assert "Traceback" not in (tmp_path / "log").read_text()
