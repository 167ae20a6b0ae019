"""Where benchmark results go: one JSON file a run, with what it ran on."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("dsa-indexer", "torch", "grpcio", "protobuf")


def processor() -> str:
    """The CPU's name and the cores that this process may use."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def installed(package: str) -> str:
    """Its version, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def write(
    name: str,
    device: str,
    results: dict[str, Any],
    *,
    packages: Sequence[str] = PACKAGES,
    suffix: str = "",
    folder: Path = RESULTS,
) -> Path:
    """Write `<name>-<date><suffix>.json`; returns its path.

    Args:
        name: of card and benchmark, for example "cpu-handoff".
        device: what it ran on, in full.
        packages: whose versions are recorded.
        folder: where the file goes.
    """
    now = datetime.now(UTC)
    record = {
        "device": device,
        "date": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in packages},
        "results": results,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{now:%Y-%m-%d}{suffix}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
