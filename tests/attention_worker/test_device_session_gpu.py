"""A worker's session on a GPU with a service process that is killed and comes again."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention_worker.gpu_steps import GEOMETRY
from tests.attention_worker.mps import mps_daemon
from tests.attention_worker.services import logs
from tests.attention_worker.worker_program import ATTACHED_AT, BACK_AT, KILLED_AT, STEPS

pytestmark = pytest.mark.gpu

SECONDS = 200
MOST_MS_AT_THE_KILL = 60
"""One wait bound of 20 ms, and what the step takes otherwise."""
LAYERS = len(GEOMETRY.layers)


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[dict[str, str]]:
    with mps_daemon(tmp_path / "mps") as variables:
        yield variables


def run(repository: Path, folder: Path, environment: dict[str, str], *arguments: str) -> Any:
    paths = os.pathsep.join(str(repository / root) for root in (".", "client", "proto"))
    paths = os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.attention_worker.worker_program", str(folder)]
    result = subprocess.run(
        [*command, *arguments], cwd=repository, env={**environment, "PYTHONPATH": paths},
        text=True, capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    service = logs(folder)
    assert result.returncode == 0, f"{result.stderr[-4000:]}\nservice:\n{service}"
    told = json.loads(result.stdout.splitlines()[-1])
    print(json.dumps(told, indent=1), "\nworker:", result.stderr[-1500:], "\nservice:", service)
    return told


def check_life_of_a_session(told: Any) -> None:
    """One graph, and right selections before, with, without and again with a service."""
    answered = [0, *told["answered"]]
    assert told["wrong"] == []
    assert answered[ATTACHED_AT - 1] == 0
    assert answered[KILLED_AT - 1] == LAYERS * (KILLED_AT - ATTACHED_AT), "all of these steps"
    assert answered[BACK_AT - 1] <= LAYERS * (KILLED_AT + 1 - ATTACHED_AT), "only until the kill"
    back = answered[STEPS] - answered[BACK_AT - 1]
    assert back == LAYERS * (STEPS + 1 - BACK_AT), "all of the steps since it is back"
    assert (told["attachments"], told["detachments"]) == (2, 1)
    assert told["stamps"]
    remote = STEPS + 1 - BACK_AT + KILLED_AT + 1 - ATTACHED_AT
    assert told["spans"]["dsa.step"] == STEPS
    assert told["spans"]["dsa.handback"] >= LAYERS * (remote - 1)


def test_under_mps_a_killed_service_costs_one_bound_and_no_selection(
    repository: Path, tmp_path: Path, mps: dict[str, str]
) -> None:
    told = run(repository, tmp_path, mps, "mps", "0")
    check_life_of_a_session(told)
    assert told["placement"] == "mps"
    assert max(told["step_ms_at_the_kill"]) < MOST_MS_AT_THE_KILL


def test_on_a_second_gpu_it_is_the_same(repository: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    told = run(repository, tmp_path, dict(os.environ), "peer_gpu", "1")
    check_life_of_a_session(told)
    assert told["placement"] == "peer_gpu"
