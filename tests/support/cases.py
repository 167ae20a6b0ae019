"""Cases that run in processes of their own, the interpreter's, and again with a guard taken out.

A process prints one JSON line a case; `check` starts one a core and judges what they printed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

PLANTED = "planted: "

Case = Callable[[], None]
Planted = tuple[str, Case, Any, str, Any]
"""Name, case, and what is replaced by what: object, attribute, replacement."""


def tell(cases: Mapping[str, Case], planted: Iterable[Planted]) -> None:
    """Run this process's share of them, all without arguments, and print how each ended."""
    runs = list(cases.items())
    runs += [(f"{PLANTED}{name}", partial(_with, *rest)) for name, *rest in planted]
    first, processes = map(int, sys.argv[1:] or (0, 1))
    for name, case in runs[first::processes]:
        wrong = None
        try:
            case()
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[-300:]}"
        print(json.dumps({"name": name, "error": wrong}), flush=True)


def _with(case: Case, target: Any, name: str, replacement: Any) -> None:
    with patch.object(target, name, replacement):
        case()


def check(repository: Path, module: str, *, cases: int, planted: int, seconds: float) -> None:
    """Each case is right, and each planted fault fails an assertion; at least so many of both."""
    paths = os.pathsep.join(str(repository / root) for root in (".", "client", "proto"))
    cores = os.cpu_count() or 1

    def share(first: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, str(first), str(cores)], cwd=repository,
            env={**os.environ, "PYTHONPATH": paths}, text=True, capture_output=True,
            timeout=seconds,
        )  # fmt: skip

    told: dict[str, str | None] = {}
    with ThreadPoolExecutor(cores) as pool:
        for result in pool.map(share, range(cores)):
            assert result.returncode == 0, result.stderr[-2000:]
            lines = map(json.loads, result.stdout.splitlines())
            told |= {line["name"]: line["error"] for line in lines}
    faults = {name: error for name, error in told.items() if name.startswith(PLANTED)}
    assert len(faults) >= planted and len(told) - len(faults) >= cases
    assert {name: error for name, error in told.items() if error and name not in faults} == {}
    unseen = [name for name, error in faults.items() if not str(error).startswith("Assertion")]
    assert not unseen, f"not seen: {unseen}"
