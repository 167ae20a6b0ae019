"""The tool that lets a command's processes stand still now and then."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually


@pytest.fixture
def tool(repository: Path) -> list[str]:
    return [sys.executable, str(repository / "tools" / "stall.py")]


def test_who_ends_it_leaves_nothing_standing_still(tool: list[str]) -> None:
    stalls = ["--every", "0.01", "--least", "600", "--most", "600"]
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    stalling = subprocess.Popen([*tool, *stalls, *sleeps], stderr=subprocess.DEVNULL)
    watched = psutil.Process(stalling.pid)
    stopped: list[psutil.Process] = []

    def stands_still() -> bool:
        stopped[:] = [c for c in watched.children() if c.status() == psutil.STATUS_STOPPED]
        return bool(stopped)

    try:
        assert eventually(stands_still)
        stalling.send_signal(signal.SIGINT)
        stalling.wait(30)
        assert eventually(lambda: stopped[0].status() != psutil.STATUS_STOPPED)
    finally:
        for process in stopped:
            process.kill()
        stalling.kill()
        stalling.wait()


def test_a_command_is_needed(tool: list[str]) -> None:
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 2
    assert "command: none is given (fix: " in done.stderr
