"""Workers beside each other on a GPU: what one does to the others, and what its death frees."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.attention_worker.mps import mps_daemon
from tests.attention_worker.services import Services, logs

pytestmark = pytest.mark.gpu

QUIET_SECONDS = 2.0
READY_SECONDS = 90.0
MOST_DELAY_US = 100.0
SHARE_OF_MEMORY = 0.55
"""More than half: a second engine finds room only where the first one's is free."""
MOST_SECONDS_TO_FREE = 0.5
KEPT_BYTES = 1 << 30
"""What a service may keep of a session: its graphs' temporaries."""
PROGRAM = "tests.attention_worker.neighbours_program"


class Host:
    """A service, and how to start workers beside it."""

    def __init__(self, folder: Path, placement: str, environment: dict[str, str]) -> None:
        device = 1 if placement == "peer_gpu" else 0
        self._placement, self._device, self._environment = placement, device, environment
        self._log = folder / "workers.log"
        self.services = Services(folder, device, 1, environment=environment)
        self.services.start()
        self.services.wait_until_it_serves()

    @contextmanager
    def worker(self, role: str, room: int = 0) -> Iterator["subprocess.Popen[str]"]:
        command = [sys.executable, "-m", PROGRAM, self.services.address, self._placement]
        with self._log.open("a") as log:
            process = subprocess.Popen(
                [*command, str(self._device), role, str(room)], env=self._environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)

    def tells(self) -> str:
        return logs(self._log.parent)


@pytest.fixture(params=["mps", "timeslice", "peer_gpu"])
def host(request: pytest.FixtureRequest, tmp_path: Path, repository: Path) -> Iterator[Host]:
    if request.param == "peer_gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    paths = os.pathsep.join([str(repository / root) for root in (".", "client", "proto")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([paths, *sys.path])}
    with ExitStack() as stack:
        if request.param == "mps":
            environment |= stack.enter_context(mps_daemon(tmp_path / "mps"))
            environment["PYTHONPATH"] = os.pathsep.join([paths, *sys.path])
        made = Host(tmp_path, request.param, environment)
        stack.callback(made.services.close)
        yield made


def ready(host: Host, process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", host.tells()


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def said(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())  # type: ignore[no-any-return]


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]


def test_sessions_that_come_and_go_delay_nobody(host: Host) -> None:
    with (
        host.worker("runs") as one,
        host.worker("runs") as two,
        host.worker("comes and goes") as other,
    ):
        for process in (one, two, other):
            ready(host, process)
        time.sleep(QUIET_SECONDS)
        came = time.monotonic()
        go(other)
        assert said(other)["wrong"] == 0
        assert other.wait(30) == -signal.SIGKILL
        time.sleep(0.5)  # its session ends
        gone = time.monotonic()
        for process in (one, two):
            go(process)
        for process in (one, two):
            told = said(process)
            assert (told["wrong"], told["inline"]) == (0, 0)
            quiet = [taken for began, taken in told["steps"] if began < came]
            beside = [taken for began, taken in told["steps"] if came <= began < gone]
            figures = {
                "steps": [len(quiet), len(beside)],
                "median": [round(median(times), 1) for times in (quiet, beside)],
                "p99": [round(_p99(times), 1) for times in (quiet, beside)],
                "most": [round(max(times), 1) for times in (quiet, beside)],
            }
            print(json.dumps(figures))
            assert _p99(beside) - _p99(quiet) <= MOST_DELAY_US, figures


def test_a_killed_worker_s_memory_is_free_at_once(host: Host) -> None:
    free, total = torch.cuda.mem_get_info(0)
    room = int(total * SHARE_OF_MEMORY)
    with host.worker("runs", room) as first:
        ready(host, first)
        assert torch.cuda.mem_get_info(0)[0] < free - room
        first.kill()
        killed = time.monotonic()
        while torch.cuda.mem_get_info(0)[0] < free - KEPT_BYTES:
            assert time.monotonic() < killed + 10, (free, torch.cuda.mem_get_info(0))
            time.sleep(0.005)
        seconds = time.monotonic() - killed
        print("free after", round(seconds, 3), "s")
    with host.worker("runs", room) as second:
        ready(host, second)
        go(second)
        told = said(second)
        assert (told["wrong"], told["inline"]) == (0, 0)
    assert seconds <= MOST_SECONDS_TO_FREE
