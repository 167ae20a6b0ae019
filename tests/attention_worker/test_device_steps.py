"""Steps of a worker on a GPU, interpreted: each case passes, and fails with its guard taken out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

SECONDS = 300


def test_each_case_is_right_and_each_planted_fault_is_seen(repository: Path) -> None:
    paths = os.pathsep.join(str(repository / root) for root in (".", "client", "proto"))
    result = subprocess.run(
        [sys.executable, "-m", "tests.attention_worker.device_step_plants"],
        cwd=repository, env={**os.environ, "PYTHONPATH": paths}, text=True, capture_output=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    told = {line["name"]: line["error"] for line in map(json.loads, result.stdout.splitlines())}
    planted = {name: error for name, error in told.items() if name.startswith("planted: ")}
    assert len(planted) >= 16 and len(told) - len(planted) >= 26
    assert {name: error for name, error in told.items() if error and name not in planted} == {}
    unseen = [name for name, error in planted.items() if not str(error).startswith("Assertion")]
    assert not unseen, f"not seen: {unseen}"
