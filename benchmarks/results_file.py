"""Where benchmark results go: one JSON file a run, with what it ran on.

A long benchmark can run in parts: what a run did not measure stays as the file of the same day has
it, if that is of the same commit, device and versions.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_BEGAN = time.monotonic()
PACKAGES = ("dsa-indexer", "torch", "grpcio", "protobuf")


def processor() -> str:
    """The CPU's name and the cores that this process may use."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def card(device: str) -> str:
    """A GPU's name as names of results files begin with: "h200" of "NVIDIA H200"."""
    return device.removeprefix("NVIDIA ").lower().replace(" ", "-")


def installed(package: str) -> str:
    """Its version, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Of the tree that this program lies in, "+" behind it if code differs; "" outside of git."""
    changed = ["status", "--porcelain", "-uno", "--", ":/", ":!/benchmarks/results", ":!/docs"]
    found = _git("rev-parse", "--short=9", "HEAD")
    return f"{found}+" if found and _git(*changed) else found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


_COMMIT = commit()  # when the program began: what comes while it measures is not what it ran


Combine = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
"""From the results of an earlier part and those of this one to those of both."""


def by_name(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Parts that have names of their own."""
    return {**before, **now}


def by_key(rows: str, *fields: str) -> Combine:
    """Parts that are rows of a list, told apart by some of their fields: newer rows replace all
    older ones of the same.
    """

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[field] for field in fields)

    def combine(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        new = {key(row) for row in now[rows]}
        kept = [row for row in before[rows] if key(row) not in new]
        return {**before, **now, rows: [*kept, *now[rows]]}

    return combine


def write(
    name: str,
    device: str,
    results: dict[str, Any],
    *,
    packages: Sequence[str] = PACKAGES,
    suffix: str = "",
    folder: Path = RESULTS,
    combine: Combine | None = None,
) -> Path:
    """Write `<name>-<date><suffix>.json`, with how long this program has run; returns its path.

    Args:
        name: of card and benchmark, for example "cpu-handoff".
        device: what it ran on, in full.
        packages: whose versions are recorded.
        folder: where the file goes.
        combine: with the results of the same day's file, if that fits; None: it is replaced.
    """
    now = datetime.now(UTC)
    record = {
        "device": device,
        "date": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in packages},
        "commit": _COMMIT,
        "seconds": round(time.monotonic() - _BEGAN),
        "results": results,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{now:%Y-%m-%d}{suffix}.json"
    if combine is not None and path.exists():
        before: dict[str, Any] = json.loads(path.read_text())
        same = ("device", "versions", "commit")
        if [before.get(field) for field in same] == [record[field] for field in same]:
            record["results"] = combine(before["results"], results)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
