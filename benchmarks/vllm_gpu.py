"""vLLM on a GPU, through its own sparse backends and through this project's: answers and times.

    python benchmarks/vllm_gpu.py [--results FOLDER] [--times] [--case NAME ...] [--together]

Every case is an engine in a process of its own. Cases with a service get one, and the MPS daemon
that it needs. vLLM does not repeat its own tokens: with it log-probabilities of prompts are
compared, within a tolerance; this project's cases are compared bit for bit. Exit status: 0 if
everything compared as it must.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from handoff_gpu import mps, service
from results_file import RESULTS, write

ENGINE = Path(__file__).with_name("vllm_gpu_engine.py")
ENGINE_SECONDS = 400
PACKAGES = ("dsa-indexer", "torch", "triton", "vllm", "cuda-bindings")
TOLERANCE = 0.05
"""Of the median difference of a prompt token's log-probability: the model is chaotic."""


@dataclass(frozen=True)
class Case:
    """Attributes:
    arguments: of the engine's program.
    variables: of the plugin.
    remote: with a service.
    """

    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    remote: bool = False


OURS = "CUSTOM"
INLINE = {"DSA_INDEXER_PLACEMENT": "inline"}
CASES = {
    "FLASHMLA_SPARSE": Case(("FLASHMLA_SPARSE",)),
    "FLASH_ATTN_MLA_SPARSE": Case(("FLASH_ATTN_MLA_SPARSE",)),
    "inline": Case((OURS,), INLINE),
    "inline, eager": Case((OURS, "--eager"), INLINE),
    "inline, form of SM80": Case((OURS,), {**INLINE, "DSA_INDEXER_FORCE_ARCH": "80"}),
    "remote": Case((OURS,), {"DSA_INDEXER_PLACEMENT": "mps"}, remote=True),
    "remote, eager": Case((OURS, "--eager"), {"DSA_INDEXER_PLACEMENT": "mps"}, remote=True),
    "remote, FLASHMLA_SPARSE": Case(
        ("FLASHMLA_SPARSE",), {"DSA_INDEXER_PLACEMENT": "mps"}, remote=True
    ),
}
SAME_BITS = ("inline", "remote")
"""Only graphs against graphs: batches of other sizes move bits of vLLM's own layers."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--together", action="store_true", help="all at once: for answers only")
    parser.add_argument("--case", action="append", choices=list(CASES))
    asked = parser.parse_args()
    names = asked.case or list(CASES)
    more = ["--times"] if asked.times else []
    found = run(names, more, together=asked.together)
    complaints = compare(found)
    write(
        "h200-vllm",
        torch.cuda.get_device_name(),
        {"cases": found, "complaints": complaints},
        packages=PACKAGES,
        folder=asked.results,
    )
    print_table(found)
    print("\n".join(complaints) or "everything compares as it must")
    sys.exit(bool(complaints))


def run(names: list[str], more: list[str], *, together: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = dict(os.environ)
        address = ""
        if any(CASES[name].remote for name in names):
            environment = stack.enter_context(mps(folder / "mps"))
            address = stack.enter_context(service(folder, 0, environment))
        started = []
        for name in names:
            started.append((name, start(name, more, environment, address, folder)))
            if not together:
                found[name] = answer(*started.pop(), folder)
        for name, process in started:
            found[name] = answer(name, process, folder)
    return found


def start(
    name: str, more: list[str], environment: dict[str, str], address: str, folder: Path
) -> "subprocess.Popen[str]":
    case = CASES[name]
    variables = {**environment, "DSA_INDEXER_ALLOW_UNTESTED": "1", **case.variables}
    if case.remote:
        # Whatever keeps the service away is to be seen.
        variables |= {"DSA_INDEXER_ADDRESS": address, "DSA_INDEXER_ON_REFUSAL": "error"}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(ENGINE), *case.arguments, *more],
            stdout=subprocess.PIPE,
            stderr=log,
            env=variables,
            text=True,
        )


def answer(name: str, process: "subprocess.Popen[str]", folder: Path) -> Any:
    try:
        out, _ = process.communicate(timeout=ENGINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {}
    if "statistics" not in found:
        found["log"] = (folder / f"{name}.log").read_text()[-3000:]
    return found


def compare(found: dict[str, Any]) -> list[str]:
    """What does not compare as it must."""
    complaints = [f"{name}: {each['log']}" for name, each in found.items() if "log" in each]
    done = {name: each for name, each in found.items() if "log" not in each}
    for name, each in done.items():
        if CASES[name].arguments[0] == OURS and each["decode"] != each["again"]:
            complaints.append(f"{name}: does not repeat its own bits")
    ours = [done[name] for name in SAME_BITS if name in done]
    for field_name in ("prefill", "decode"):
        if any(each[field_name] != ours[0][field_name] for each in ours):
            complaints.append(f"{' and '.join(SAME_BITS)}: {field_name} differs in bits")
    native = done.get("FLASHMLA_SPARSE")
    for name, each in done.items():
        if native is not None:
            each["difference"] = difference(each["prefill"], native["prefill"])
            if each["difference"] > TOLERANCE:
                complaints.append(
                    f"{name}: prompts' log-probabilities are {each['difference']} off"
                )
    for name, each in done.items():
        if CASES[name].remote:
            counts = each["statistics"][0]
            if counts["inline_layers"] or not counts["answered_layers"]:
                complaints.append(f"{name}: {counts}")
    return complaints


def difference(mine: list[list[float]], other: list[list[float]]) -> float:
    """Median of the absolute differences."""
    pairs = zip(chain(*mine), chain(*other), strict=True)
    return round(median(abs(one - two) for one, two in pairs), 5)


def print_table(found: dict[str, Any]) -> None:
    for name, each in found.items():
        times = "  ".join(f"{row}: {ms}" for row, ms in each.get("milliseconds", {}).items())
        print(
            f"{name:28} start {each.get('start_seconds', '-'):>6} s  "
            f"difference {each.get('difference', '-')}  {times}"
        )
        for counts in each.get("statistics", []):
            print(f"    {counts}")


if __name__ == "__main__":
    main()
