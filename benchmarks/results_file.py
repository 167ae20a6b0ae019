"""Where benchmark results go: one JSON file a run, with what it ran on."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """The CPU's name and the cores that this process may use."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def write(name: str, device: str, results: dict[str, Any]) -> Path:
    """Write `<name>-<date>.json`; returns its path.

    Args:
        name: of card and benchmark, for example "cpu-handoff".
        device: what it ran on, in full.
    """
    now = datetime.now(UTC)
    packages = ("dsa-indexer", "torch", "grpcio", "protobuf")
    record = {
        "device": device,
        "date": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
