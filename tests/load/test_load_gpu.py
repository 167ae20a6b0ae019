"""`dsa-indexer load` on a GPU, as users run it: a service of its own under every placement, steps
of every kind, answers compared, and a soak that is flat."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer_cli.mps import CONTROL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

SECONDS = 1200
"""A kind of GPU that was never tuned for takes minutes, once."""
WORKLOAD = """
[model]
layers = 3
heads = 64
top_k = 512

[load]
sessions = {sessions}
seconds = {seconds}
warm_up_seconds = 3
reopen_seconds = {reopen}

[steps]
batch = {{ kind = "uniform", low = 1, high = 9 }}
context = {{ kind = "uniform", low = 64, high = 6000 }}
prefill_rows = {{ kind = "choice", values = [7, 64] }}
rows_per_decode = 2
mix = {{ decode = 6, mixed = 1, prefill = 1 }}

[check]
share = 0.2
"""


def run(folder: Path, placement: str, *changes: str, **numbers: float) -> dict[str, Any]:
    """What a run printed for machines; it must have ended well."""
    if placement == "mps" and shutil.which(CONTROL) is None:
        pytest.skip(f"needs {CONTROL}")
    if placement == "peer_gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    workload = folder / "small.toml"
    workload.write_text(WORKLOAD.format(**{"sessions": 1, "seconds": 5, "reopen": 0, **numbers}))
    sets = [part for change in changes for part in ("--set", change)]
    report = folder / "report.html"
    command = [sys.executable, "-m", "dsa_indexer_cli", "load", str(workload), *sets]
    result = subprocess.run(
        [*command, "--placement", placement, "--json", "--report", str(report)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
    assert "everything holds" in report.read_text()
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("placement", ["inline", "mps", "timeslice", "peer_gpu"])
def test_steps_of_every_kind_are_answered_right(placement: str, tmp_path: Path) -> None:
    found = run(tmp_path, placement)
    assert found["service"]["placement"] == placement
    assert found["service"]["gpu"] == torch.cuda.get_device_name(0)
    assert {shape["kind"] for shape in found["shapes"]} == {"decode", "mixed", "prefill"}
    assert found["forward"]["count"] == found["steps"] > 50
    assert found["checked"] > 10 and found["wrong_answers"] == 0
    if placement == "inline":
        assert found["inline_share"] == 1.0
    else:
        assert found["inline_layers"] == 0
        assert found["layer"]["count"] > 0


def test_two_sessions_share_a_gpu(tmp_path: Path) -> None:
    found = run(tmp_path, "mps", sessions=2)
    assert found["workload"]["load"]["sessions"] == 2
    assert found["inline_layers"] == 0 and found["checked"] > 10


def test_sessions_that_come_anew_leave_nothing_behind(tmp_path: Path) -> None:
    found = run(tmp_path, "mps", "soak.sample_seconds=0.5", seconds=60, reopen=6)
    assert found["reopened"] >= 4
    watched = {growth["process"] for growth in found["growths"]}
    assert watched == {"service", "session 0", "GPU 0"}
