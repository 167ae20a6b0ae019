"""A worker's selections and time while its service is ended or held up, under every placement.

One process a placement lives through all cases (`faults`); each test judges one of them.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.attention_worker import faults
from tests.attention_worker.gpu_steps import GEOMETRY
from tests.attention_worker.mps import mps_daemon
from tests.attention_worker.services import logs

pytestmark = pytest.mark.gpu

SECONDS = 120
LAYERS = len(GEOMETRY.layers)
MOST_ATTACH_SECONDS = 2.0
MOST_BOUND_MS = 60.0
"""A bound of 20 ms, what a pause goes on, and the end of a process."""

Told = dict[str, dict[str, Any]]


def _lived(
    repository: Path, folder: Path, environment: dict[str, str], *arguments: str
) -> dict[str, dict[str, Any]]:
    """By case, what a worker said of its life."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.attention_worker.faults_program", str(folder)]
    with (folder / "worker.out").open("w+") as out, (folder / "worker.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *arguments], cwd=repository, env=environment, stdout=out, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its services, too
        out.seek(0)
        output = out.read()
    print(output, logs(folder))
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


def lived(repository: Path, folder: Path, environment: dict[str, str], placement: str) -> Told:
    """All lives together; of what comes in each of them, the first."""
    paths = os.pathsep.join(str(repository / root) for root in (".", "client", "proto"))
    paths = os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")])
    environment = {**environment, "PYTHONPATH": paths}
    device = "1" if placement == "peer_gpu" else "0"
    told: Told = {}
    for number, names in enumerate(faults.lives(placement)):
        life = folder / f"life-{number}"
        told = _lived(repository, life, environment, placement, device, *names) | told
    return told


@pytest.fixture(scope="module", params=["mps", "timeslice", "peer_gpu"])
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> Iterator[tuple[str, Told]]:
    placement = request.param
    if placement == "peer_gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp(placement)
    if placement != "mps":
        yield placement, lived(repository, folder, dict(os.environ), placement)
        return
    with mps_daemon(folder / "mps") as variables:
        yield placement, lived(repository, folder, variables, placement)


def case(told: tuple[str, Told], name: str) -> dict[str, Any]:
    """What was said of a case, in which no selection was wrong."""
    placement, found = told
    if name not in faults.cases(placement) and name in faults.ILLEGAL:
        pytest.skip("under MPS an illegal access ends the worker as well")
    assert name in found, f"the program did not come to it: {list(found)}"
    assert found[name].get("error") is None, found[name]
    assert found[name]["wrong"] == [], found[name]
    print(json.dumps(found[name]))
    return found[name]


def test_a_session_is_attached(told: tuple[str, Told]) -> None:
    found = case(told, "attached")
    assert found["placement"] == told[0]
    assert found["answered"][-1] == LAYERS


@pytest.mark.parametrize("name", [*faults.ENDED, *faults.ILLEGAL])
def test_a_service_that_ends_costs_one_bound(told: tuple[str, Told], name: str) -> None:
    found = case(told, name)
    assert (found["detachments"], found["attachments"]) == (1, 1)
    assert not any(found["inline"])
    assert found["bound ms"] <= MOST_BOUND_MS
    assert found["seconds to attach"] <= MOST_ATTACH_SECONDS
    assert found["remote"] == found["last answered"] == LAYERS
    if name.startswith("stopped"):
        assert found["ends by itself"] == 0
    if name.endswith(("gate", "scores", "prefill")):
        assert found["in the step"]
        assert found["answered at the fault"] == 1, "it pauses in its second layer"


def test_an_answer_that_comes_late_is_not_taken(told: tuple[str, Told]) -> None:
    found = case(told, "late")
    assert found["answered at the fault"] == 1
    assert (found["detachments"], found["attachments"]) == (1, 1)
    assert found["first ms"] <= MOST_BOUND_MS
    assert found["seconds to attach"] <= MOST_ATTACH_SECONDS
    assert found["last answered"] == LAYERS


@pytest.mark.parametrize("where", ["first", "between"])
def test_a_worker_may_pause_for_ten_bounds(told: tuple[str, Told], where: str) -> None:
    found = case(told, f"worker pauses, {where}")
    assert found["answered at the pause"] == LAYERS
    assert (found["detachments"], found["cancelled"]) == (0, 0)


@pytest.mark.parametrize("where", ["first", "between"])
def test_a_worker_that_pauses_longer_than_a_gate_waits_is_inline_for_a_step(
    told: tuple[str, Told], where: str
) -> None:
    found = case(told, f"worker leaves, {where}")
    assert found["answered at the pause"] == (0 if where == "first" else 1)
    assert (found["detachments"], found["cancelled"]) == (0, 1)
    assert found["last answered"] == LAYERS


def test_an_idle_engine_is_still_attached(told: tuple[str, Told]) -> None:
    found = case(told, "idle")
    assert found["answered"] == LAYERS
    assert (found["detachments"], found["cancelled"]) == (0, 0)


@pytest.mark.parametrize("name", ["closed while gated", "lease ends while gated"])
def test_a_session_that_the_service_ends_is_replaced(told: tuple[str, Told], name: str) -> None:
    found = case(told, name)
    assert found["answered at the fault"] == 0
    assert (found["detachments"], found["attachments"]) == (1, 1)
    assert found["seconds to attach"] <= MOST_ATTACH_SECONDS
    assert found["last answered"] == LAYERS


def test_a_service_that_was_exchanged_while_nobody_looked(told: tuple[str, Told]) -> None:
    found = case(told, "restarted")
    assert (found["detachments"], found["attachments"]) == (1, 1)
    assert found["seconds to attach"] <= MOST_ATTACH_SECONDS
    assert found["last answered"] == LAYERS


def test_a_cache_that_was_freed_and_made_again_at_its_address(told: tuple[str, Told]) -> None:
    found = case(told, "reallocated")
    assert found["same address"]
    assert found["last answered"] == LAYERS


def test_nothing_stays_mapped(told: tuple[str, Told]) -> None:
    found = told[1]["mapped"]
    assert found == {"worker": 0, "service": 0, "mapped bytes": 0, "sessions": 0}
