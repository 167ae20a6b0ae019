"""Runs the tests that need a GPU, a file at a time, and keeps what passed as a results file.

    python benchmarks/gpu_tests.py [--results FOLDER] [FILE ...]

Files can run one by one: the day's results keep the others. Ends with status 1 if a test failed.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import typer
from documents import ROOT
from results_file import RESULTS, by_name, card, write

PACKAGES = ("dsa-indexer", "torch", "triton", "cuda-bindings", "vllm", "deep-gemm")
FILE_SECONDS = 3600
_MARK = "mark.gpu"
_TOLD = 10_000


def files_with_gpu_tests() -> list[str]:
    """Test files that have the mark, from the root of the tree."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(file.relative_to(ROOT)) for file in found if _MARK in file.read_text())


def outcome(report: Path) -> dict[str, Any]:
    """What a JUnit report of pytest says."""
    cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    if not cases:
        return {"passed": 0, "failed": ["no test that needs a GPU"], "skipped": 0}
    failed = [case for case in cases if case.find("failure") is not None or _broke(case)]
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons = {str(skip.get("message")) for case in skipped for skip in case.iter("skipped")}
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": [str(case.get("name")) for case in failed],
        "skipped": len(skipped),
        "skipped because": sorted(reasons),
    }


def _broke(case: ElementTree.Element) -> bool:
    return case.find("error") is not None


def run(file: str) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", file]
        try:
            with log.open("w") as said:
                subprocess.run(command, cwd=ROOT, stdout=said, stderr=said, timeout=FILE_SECONDS)
            found = outcome(report)
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            found = {"passed": 0, "failed": [str(error)], "skipped": 0}
        if found["failed"]:  # also where pytest itself has crashed, or hangs
            print(log.read_text()[-_TOLD:])
    return {**found, "seconds": round(time.monotonic() - began)}


def main(
    files: Annotated[list[str] | None, typer.Argument(help="Test files; all by default.")] = None,
    results: Annotated[Path, typer.Option(help="Folder for the results file.")] = RESULTS,
) -> None:
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is here")
    name = torch.cuda.get_device_name()
    device = f"{torch.cuda.device_count()} x {name}"
    path, passed = None, True
    for file in files or files_with_gpu_tests():
        found = run(file)
        passed = passed and not found["failed"]
        print(file, found, flush=True)
        path = write(
            card(name), device, {file: found}, packages=PACKAGES, suffix="-gpu_tests",
            folder=results, combine=by_name,
        )  # fmt: skip
    print(f"written: {path}")
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    typer.run(main)
