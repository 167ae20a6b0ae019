"""The race lab for GPUs, as far as it goes without one."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton exists on Linux only")

from dsa_indexer_cli import mps, racelab_command
from dsa_indexer_cli.main import app
from dsa_indexer_cli.racelab import cuda_run
from dsa_indexer_cli.racelab.cuda_bench import HASTY, OPEN, PATIENT, Terms
from dsa_indexer_cli.racelab.cuda_races import PROVOCATIONS
from dsa_indexer_cli.racelab.cuda_service import ReadFindings, WrittenFindings
from dsa_indexer_cli.racelab.provocation import Provocation, Seen, provoke
from ipc_handoff.detectors import Detector
from ipc_handoff.findings import Finding, FindingKind
from tests.support.cases import check
from tests.support.waiting import eventually


def _finding(step: int, kind: FindingKind = FindingKind.TORN_INPUT) -> Finding:
    return Finding(kind, step, 3, None, "dsa.gate", 1, "#1", "130", "131")


class _Bench:
    """Catches every race but those that are named."""

    def __init__(self, missed: tuple[str, ...] = ()) -> None:
        self.missed = missed

    def forget(self) -> None:
        pass

    def findings(self) -> list[Seen]:
        return []

    def of(self, step: int, kind: FindingKind) -> list[Seen]:
        return [] if kind in self.missed else [Seen("service", _finding(step, kind))]


def _races(count: int) -> list[Provocation[Any, Any]]:
    kind, detector = FindingKind.TORN_INPUT, Detector.INPUTS
    return [Provocation(f"race {i}", kind, detector, lambda made: 1, PATIENT) for i in range(count)]


def test_races_that_the_worker_finds_are_caught(repository: Path) -> None:
    check(repository, "tests.attention_worker.lab_cases", cases=7, planted=2, seconds=240)


def test_every_kind_is_provoked_but_those_that_nobody_can_provoke_there() -> None:
    assert {race.detector for race in PROVOCATIONS} == set(Detector)
    left_out = {FindingKind.READ_BEFORE_WRITTEN}
    assert {race.kind for race in PROVOCATIONS} == set(FindingKind) - left_out


def test_each_race_is_provoked_once_though_the_time_is_over() -> None:
    found = provoke(_Bench(), _races(3), 100, lambda doing: None, seconds=0.0)
    assert [(race.provoked, race.caught) for race in found] == [(1, 1)] * 3


def test_races_are_provoked_as_often_as_asked_while_there_is_time() -> None:
    found = provoke(_Bench((FindingKind.TORN_INPUT,)), _races(2), 7, lambda doing: None)
    assert [(race.provoked, race.caught) for race in found] == [(7, 0)] * 2


def test_a_part_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def bench(terms: Terms, log: Path, detectors: str) -> Iterator[_Bench]:
        if terms is HASTY:
            raise ValueError("no service: it does not serve")
        yield _Bench()

    monkeypatch.setattr(cuda_run, "cuda_bench", bench)
    races = tuple(
        Provocation(race.name, race.kind, race.detector, lambda made: 1, race.terms)
        for race in PROVOCATIONS
    )
    monkeypatch.setattr(cuda_run, "PROVOCATIONS", races)
    result = cuda_run.run_cuda_lab(2, 0, lambda doing: None, tmp_path / "log")
    others = [race.name for race in PROVOCATIONS if race.terms in (PATIENT, OPEN)]
    assert [race.name for race in result.provoked] == others
    assert all(race.caught == race.provoked == 2 for race in result.provoked)
    (failed,) = result.failed
    assert "ValueError: no service: it does not serve" in failed
    assert failed.startswith("gate without its worker")
    assert not result.ok


def test_what_a_service_finds_arrives_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    read, written = ReadFindings(file), WrittenFindings(file)
    assert read.new() == []
    written.found(_finding(1))
    written.found(_finding(2, FindingKind.NAN_SCORES))
    assert read.new() == [_finding(1), _finding(2, FindingKind.NAN_SCORES)]
    with file.open("a") as half:
        half.write('{"kind": "torn_')
    assert read.new() == []
    with file.open("a") as half:
        line = json.dumps(vars(_finding(3)))
        half.write(line.removeprefix('{"kind": "torn_') + "\n")
    assert read.new() == [_finding(3)]


def _control(patch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Have this script found in place of MPS's control program."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_a_daemon_the_lab_runs_under_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    told = f'echo "$1:$CUDA_MPS_PIPE_DIRECTORY" >> {calls}; [ -n "$1" ] || cat >> {calls}'
    _control(monkeypatch, tmp_path, f'touch "$CUDA_MPS_PIPE_DIRECTORY/control"; {told}')
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nobody"))
    assert not mps.is_served()
    program = "import sys; from dsa_indexer_cli import mps; sys.exit(40 + mps.is_served())"
    assert mps.run_under_mps([sys.executable, "-c", program]) == 41
    began, ended, words = calls.read_text().split()
    assert began.startswith("-d:") and ended == began.removeprefix("-d")
    assert str(tmp_path / "nobody") not in began
    assert words == "quit"


def test_a_daemon_that_does_not_listen_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is run would start another one, and so on."""
    _control(monkeypatch, tmp_path, "true")
    monkeypatch.setattr(mps, "_LISTENS_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="does not listen"):
        mps.run_under_mps(["false"])


def test_a_daemon_that_does_not_end_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"; [ -n "$1" ] || exec sleep 60'
    _control(monkeypatch, tmp_path, script)
    with pytest.raises(RuntimeError, match="of a client"), mps.mps_daemon(tmp_path / "mps"):
        monkeypatch.setattr(mps, "_SECONDS", 0.2)
        raise RuntimeError("of a client")
    assert "still has clients" in caplog.text


def test_a_daemon_that_keeps_its_output_open_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    number = tmp_path / "number"
    lives = f"sleep {mps._SECONDS + 30} & echo $! > {number}"
    _control(
        monkeypatch,
        tmp_path,
        f'touch "$CUDA_MPS_PIPE_DIRECTORY/control"; [ -z "$1" ] || {{ {lives}; }}',
    )
    try:
        assert mps.run_under_mps(["false"]) == 1
    finally:
        os.kill(int(number.read_text()), signal.SIGKILL)


def test_ctrl_c_leaves_the_lab_time_to_end_its_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The terminal tells both processes; the one that started the daemon waits for the other."""
    _control(monkeypatch, tmp_path, 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"')
    lab = tmp_path / "lab.py"
    lab.write_text(LAB)
    program = f"import sys; from dsa_indexer_cli.mps import run_under_mps as run; {RUN}"
    command = [sys.executable, "-c", program, str(lab), str(tmp_path)]
    started = subprocess.Popen(command, start_new_session=True)
    try:
        assert eventually((tmp_path / "began").exists)
        os.killpg(started.pid, signal.SIGINT)
        assert started.wait(30) == 7
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


LAB = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "began").touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)  # longer than subprocess.run would wait
    sys.exit(7)
"""
RUN = "sys.exit(run([sys.executable, *sys.argv[1:]]))"


def test_the_command_goes_on_under_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(racelab_command, "is_served", lambda: False)
    monkeypatch.setattr(racelab_command, "run_under_mps", lambda words: asked.append(words) or 1)
    options = ["--device", "cuda", "--provocations", "7", "--clean-steps", "0", "--json"]
    done = CliRunner().invoke(app, ["racelab", *options])
    assert done.exit_code == 1
    (words,) = asked
    assert words[1:4] == ["-m", "dsa_indexer_cli", "racelab"]
    assert dict(zip(words[4:-1:2], words[5:-1:2], strict=True)) == {
        "--device": "cuda",
        "--provocations": "7",
        "--clean-steps": "0",
        "--seconds": "220.0",
    }
    assert words[-1] == "--json"


def test_no_daemon_and_none_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(racelab_command, "is_served", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["racelab", "--device", "cuda"])
    assert done.exit_code == 1
    assert "mps: no daemon could be started" in done.output
    _control(monkeypatch, tmp_path, "echo not permitted >&2; exit 3")
    done = CliRunner().invoke(app, ["racelab", "--device", "cuda"])
    assert done.exit_code == 1
    assert "not permitted" in done.output
