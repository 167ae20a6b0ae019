"""`dsa-indexer load` as users run it: eight sessions against a service of its own, a report, and
the report in a browser."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsa_indexer_cli import load_command
from dsa_indexer_cli.demo.service_process import ServiceProcess
from dsa_indexer_cli.main import app
from tests.cli.lines import one_line
from tests.support.browser import needed_browser, screenshot

COMMAND = [sys.executable, "-m", "dsa_indexer_cli", "load"]
_LEAST_PICTURE_BYTES = 50_000  # an empty page of this size has a tenth of that


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: v for name, v in os.environ.items() if not name.startswith("DSA_INDEXER_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=clean,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "load.html"


@pytest.fixture(scope="module")
def smoke(report: Path) -> dict[str, Any]:
    """What a run with eight sessions printed for machines; its report lies at `report`."""
    changes = ("load.seconds=4", "load.warm_up_seconds=0.2", "load.wait_bound_seconds=30.0")
    sets = [part for change in changes for part in ("--set", change)]
    result = _run("smoke", *sets, "--report", str(report), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_eight_sessions_end_without_an_error(smoke: dict[str, Any]) -> None:
    assert smoke["ok"] is True
    assert smoke["workload"]["load"]["sessions"] == 8
    assert smoke["steps"] > 20 and smoke["checked"] > 0
    assert smoke["wrong_answers"] == smoke["inline_layers"] == 0
    assert smoke["failures"] == []
    assert {shape["kind"] for shape in smoke["shapes"]} == {"decode", "mixed", "prefill"}
    assert smoke["step"]["p50"] <= smoke["response"]["p50"] <= smoke["response"]["p99"]
    assert all(verdict["ok"] for verdict in smoke["verdicts"])


@pytest.mark.slow
def test_the_report_needs_nothing_besides_itself(smoke: dict[str, Any], report: Path) -> None:
    text = report.read_text()
    assert "everything holds" in text and "not everything holds" not in text
    assert text.count("<svg") == 4
    assert "<script" not in text and "<img" not in text and "@import" not in text
    links = re.findall(r"(?:href|src)=\"([^\"]*)\"", text)
    assert all(link.startswith(("#", "data:")) for link in links), links


@pytest.mark.slow
def test_the_report_opens_in_a_browser(smoke: dict[str, Any], report: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    assert screenshot(needed_browser(), report, picture, tmp_path / "profile", height=3000) == []
    assert picture.stat().st_size > _LEAST_PICTURE_BYTES


def _invoke(*arguments: str) -> tuple[int, str]:
    """Exit status and the one line of complaint, without a process of its own."""
    result = CliRunner().invoke(app, ["load", *arguments])
    return result.exit_code, one_line(result.stderr)


def test_a_workload_that_cannot_be_used_is_one_line() -> None:
    status, line = _invoke("smoke", "--set", "load.sesions=2")
    assert status == 2 and "load.sesions" in line


def test_a_report_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    status, line = _invoke("smoke", "--report", str(tmp_path / "nowhere" / "r.html"))
    assert status == 2 and "(fix: " in line


def test_nobody_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", f"unix:{tmp_path}/none.sock")
    report = tmp_path / "r.html"
    report.write_text("of the run before")
    status, line = _invoke("smoke", "--report", str(report))
    assert status == 1 and "dsa-indexer serve" in line
    assert report.read_text() == "of the run before"


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_command, "find_spec", lambda _: None)
    status, line = _invoke("smoke")
    assert status == 2 and "pip install" in line


def test_ctrl_c_does_not_reach_the_service_before_the_sessions_have_ended(tmp_path: Path) -> None:
    """A terminal sends it to all processes of its session: the service is in one of its own."""
    log = tmp_path / "log"
    program = [sys.executable, "-c", "import os; print(os.getsid(0))"]
    service = ServiceProcess(f"unix:{tmp_path}/none.sock", None, log, program)
    with pytest.raises(RuntimeError, match="does not serve"):
        service.start()
    assert int(log.read_text()) != os.getsid(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_a_test_sees_what_was_measured(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with load_command._asked_to_end() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(30)
    assert signal.getsignal(number) is before
