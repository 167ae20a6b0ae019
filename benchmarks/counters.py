"""Hardware counters of kernels, read by Nsight Compute, kept as a results file.

A benchmark that wants them names its workloads and calls `main`; the program then starts itself
once more under `ncu`. Caches are flushed before every pass and clocks are left alone. A kernel is
replayed for each group of counters, alone on the GPU: nothing overlaps, and dependent launches
start no earlier. Workloads can run one by one (`--only`): the day's file keeps the others.
"""

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from results_file import by_key, card, write

Workloads = Mapping[str, Callable[[], Callable[[], object]]]
"""By name: makes the inputs and returns the call that is measured."""

PACKAGES = ("dsa-indexer", "torch", "triton", "vllm")

_SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy",
    "LaunchStats", "SchedulerStats", "WarpStateStats", "InstructionStats",
)  # fmt: skip

_KEPT = re.compile(
    r"Duration|SM Frequency|DRAM Throughput|Memory Throughput|L2 Hit Rate|Issue Slots Busy"
    r"|SM: Pipe (Alu|Fma|Fmaheavy|Tensor) Cycles Active|SM: Inst Executed Pipe (Lsu|Xu|Uniform)"
    r"|L1: Data Pipe Lsu Wavefronts|Executed Instructions|Registers Per Thread"
    r"|Dynamic Shared Memory Per Block|Achieved Occupancy|No Eligible"
    r"|Warp Cycles Per Issued Instruction|Stall .*"
)
_LEAST_STALL = 0.05
"""Cycles a warp waits for a reason, for each instruction it issues: less is not kept."""

_BETWEEN = "spin_kernel"
"""torch.cuda._sleep's kernel: stands between two workloads."""

_WARM_CALLS = 3


def _run(workloads: Workloads) -> None:
    """Every workload once, with `_BETWEEN` ahead of it, where `ncu` looks."""
    for make in workloads.values():
        call = make()
        for _ in range(_WARM_CALLS):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        torch.cuda.empty_cache()


def _under_ncu(program: str, names: list[str], log: Path) -> None:
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    subprocess.run(
        ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv",
         "--page", "details", "--print-details", "all", *sections, "--log-file", str(log),
         sys.executable, program, "--inside", "--only", ",".join(names)],
        check=True,
    )  # fmt: skip


def parse(log: Path, names: list[str]) -> list[dict[str, Any]]:
    """What `ncu` said: one row a launch, {"workload", "kernel", "grid", "block", counters}."""
    lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines):
        launch = launches.setdefault(
            row["ID"],
            {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"],
             "counters": {}},
        )  # fmt: skip
        if (kept := _kept(row["Metric Name"], row["Metric Value"])) is not None:
            launch["counters"][f"{row['Metric Name']}, {row['Metric Unit']}"] = kept
    found: list[dict[str, Any]] = []
    current = -1
    for launch in launches.values():
        if _BETWEEN in launch["kernel"]:
            current += 1
        else:
            found.append({"workload": names[current], **launch})
    return found


def _kept(name: str, printed: str) -> float | None:
    """A counter's value, printed as "1,234.5"; None: of no interest here."""
    if not _KEPT.fullmatch(name):
        return None
    try:
        value = float(printed.replace(",", ""))
    except ValueError:  # some tables hold words
        return None
    return value if not name.startswith("Stall ") or value >= _LEAST_STALL else None


def main(program: str, name: str, workloads: Workloads) -> None:
    """The command of a benchmark's counters; writes `<card>-<date>-<name>.json`."""
    parser = argparse.ArgumentParser(description=f"Nsight Compute's counters of {name}")
    parser.add_argument("--only", help="workloads, separated by commas; all of them by default")
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--log", type=Path, help="keep all that ncu said here")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(workloads)
    if given.inside:
        _run({chosen: workloads[chosen] for chosen in names})
        return
    with TemporaryDirectory() as folder:
        log = given.log or Path(folder) / "ncu.csv"
        _under_ncu(program, names, log)
        launches = parse(log, names)
    device = torch.cuda.get_device_name()
    where = {"folder": given.out} if given.out else {}
    path = write(
        card(device), device, {"launches": launches}, packages=PACKAGES,
        suffix=f"-{name}", combine=by_key("launches", "workload"), **where,
    )  # fmt: skip
    for launch in launches:
        print(launch["workload"], "|", launch["kernel"], launch["grid"])
        for counter, value in launch["counters"].items():
            print(f"    {counter}: {value}")
    print(path)
