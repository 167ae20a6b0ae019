"""The processes that `dsa-indexer doctor` starts: that they end, and what is said of failures."""

import time
from pathlib import Path

import psutil
import pytest

from dsa_indexer_cli import doctor_gpus, doctor_handoff
from dsa_indexer_cli.children import PEER_GONE, ChildFailed
from dsa_indexer_cli.doctor_gpus import look
from dsa_indexer_cli.doctor_handoff import measure

SECONDS = 60.0
SHORT = 0.3
PROGRAM = "a_program"
HEAD = """
import json, os, socket, sys, time
side = sys.argv[1] if len(sys.argv) > 1 else ""
peer = socket.socket(fileno=int(sys.argv[2])) if side else None
def waits(): return peer.recv(1) == b""
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the children run, to be written by a test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor_gpus, "LOOK_PROGRAM", PROGRAM)
    monkeypatch.setattr(doctor_handoff, "PROGRAM", PROGRAM)
    monkeypatch.setattr(doctor_handoff, "END_SECONDS", SHORT)
    return tmp_path / f"{PROGRAM}.py"


def _nobody_is_left() -> bool:
    return not [c for c in psutil.Process().children() if PROGRAM in "".join(c.cmdline())]


def test_a_driver_that_hangs_is_named_in_time(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(doctor_gpus, "LOOK_SECONDS", SHORT)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(ChildFailed, match=r"does not answer within .* \(fix: nvidia-smi"):
        look()
    (tmp_path / "control").touch()
    with pytest.raises(ChildFailed, match="another user's"):
        look()
    assert _nobody_is_left()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('print("""{"error": "cuda: it (fix: that)"}""")', r"^cuda: it \(fix: that\)$"),
        ("import os; os.abort()", r"^ended with status -6: it said nothing$"),
        ("raise ValueError('of it')", r"^ended with status 1: ValueError: of it$"),
    ],
)
def test_a_look_that_fails_is_said_in_one_line(program: Path, source: str, says: str) -> None:
    program.write_text(source)
    with pytest.raises(ChildFailed, match=says):
        look()


def test_the_worker_s_result_counts(program: Path) -> None:
    program.write_text(
        HEAD
        + """
if side == "service":
    waits()
else:
    print("a library's own line")
    print(json.dumps({"gpus": sys.argv[3:]}))
"""
    )
    assert measure(0, 1, SECONDS) == {"gpus": ["0", "1"]}
    assert _nobody_is_left()


@pytest.mark.parametrize("failing", ["worker", "service"])
def test_the_cause_is_said_and_not_that_the_other_side_left(program: Path, failing: str) -> None:
    program.write_text(
        HEAD
        + f"""
if side == "{failing}":
    print(json.dumps({{"error": side + ": no memory"}}))
elif waits():
    print(json.dumps({{"error": "{PEER_GONE}"}}))
"""
    )
    with pytest.raises(ChildFailed, match=f"^{failing}: no memory$"):
        measure(0, 0, SECONDS)
    assert _nobody_is_left()


def test_a_measurement_that_hangs_is_ended_in_time(program: Path) -> None:
    program.write_text("import time; time.sleep(600)")
    begun = time.monotonic()
    with pytest.raises(ChildFailed, match=r"^not done within .* \(fix: nvidia-smi"):
        measure(0, 0, SHORT)
    assert time.monotonic() - begun < SECONDS
    assert _nobody_is_left()


def test_sides_that_can_end_by_themselves_are_not_killed(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while its kernel polls, a process may take the MPS server with it."""
    program.write_text(HEAD + f'waits(); open("{tmp_path}/" + side, "w")')
    monkeypatch.setattr(doctor_handoff, "END_SECONDS", SECONDS)
    with pytest.raises(ChildFailed, match="not done within"):
        measure(0, 0, 1.0)
    assert {path.name for path in tmp_path.iterdir()} >= {"worker", "service"}


def test_a_side_s_crash_is_said(program: Path) -> None:
    program.write_text(HEAD + 'os.abort() if side == "service" else waits()')
    with pytest.raises(ChildFailed, match="ended with status"):
        measure(0, 0, SECONDS)
    assert _nobody_is_left()
