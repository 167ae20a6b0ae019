"""`dsa-indexer doctor` on a host with a GPU, as users run it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer_cli.gpu_facts import collect
from tests.attention_worker.mps import mps_daemon

pytestmark = pytest.mark.gpu

SECONDS = 25.0


def _doctor(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Findings by their check."""
    command = [sys.executable, "-m", "dsa_indexer_cli", "doctor", "--json"]
    begun = time.monotonic()
    result = subprocess.run(
        [*command, "--address", f"unix:{folder}/d/i.sock"],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    assert time.monotonic() - begun < SECONDS
    assert "Traceback" not in result.stderr
    found = {finding["check"]: finding for finding in json.loads(result.stdout)}
    failed = any(finding["ok"] is False for finding in found.values())
    assert result.returncode == failed
    return found


def _without_mps(folder: Path) -> dict[str, str]:
    return {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(folder / "none")}


def test_the_driver_names_the_gpus_that_torch_knows() -> None:
    facts = collect()
    assert len(facts.gpus) == torch.cuda.device_count()
    for gpu in facts.gpus:
        known = torch.cuda.get_device_properties(gpu.ordinal)
        assert gpu.name == known.name
        assert gpu.capability == (known.major, known.minor)
        assert gpu.uuid == f"GPU-{known.uuid}"


def test_under_mps_the_hand_over_takes_microseconds(tmp_path: Path) -> None:
    with mps_daemon(tmp_path / "mps") as environment:
        found = _doctor(tmp_path, environment)
    assert found["MPS"]["ok"] is True
    assert found["placement"]["values"]["placement"] == "mps"
    assert found["hand-over mps"]["ok"] is True, found
    assert 0 < found["hand-over mps"]["values"]["microseconds_a_layer"] < 100


def test_without_mps_streams_sleep_and_are_measured(tmp_path: Path) -> None:
    environment = {**_without_mps(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    found = _doctor(tmp_path, environment)
    assert found["MPS"]["ok"] is None
    assert found["placement"]["values"]["placement"] == "timeslice"
    assert found["hand-over timeslice"]["ok"] is True, found
    assert 0 < found["hand-over timeslice"]["values"]["microseconds_a_layer"] < 5000


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_is_measured_without_mps(tmp_path: Path) -> None:
    found = _doctor(tmp_path, _without_mps(tmp_path))
    assert found["placement"]["values"]["placement"] == "peer_gpu"
    assert found["hand-over peer_gpu"]["ok"] is True, found
    assert 0 < found["hand-over peer_gpu"]["values"]["microseconds_a_layer"] < 100
