"""Runs of `dsa-indexer load`, kept as results files: one a placement, so that each can be repeated.

    python benchmarks/load_runs.py deepseek --placement mps [--set load.seconds=30 ...]
    python benchmarks/load_runs.py soak --placement cpu
    python benchmarks/load_runs.py --document benchmarks/results/FILE ...

A service of its own for each run. Ends with status 1 if something did not hold. Of what was looked
at over time a part is kept.
"""

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from load_documents import document as write_document
from results_file import RESULTS, card, processor, write

from dsa_indexer_cli.load.result import LoadResult
from dsa_indexer_cli.load.run import Progress, run_sessions
from dsa_indexer_cli.load.summary import summarise
from dsa_indexer_cli.load.workload import load_workload, parse_change

PACKAGES = ("dsa-indexer", "torch", "triton", "grpcio", "protobuf", "cuda-bindings")
LINE_SECONDS = 10.0
KEPT_SAMPLES = 40
DROPPED = ("geometry", "points", "curve", "samples")


class Lines:
    """A line whenever something else is done, and every ten seconds."""

    def __init__(self) -> None:
        self._doing, self._told = "", 0.0

    def tell(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.doing != self._doing or now - self._told >= LINE_SECONDS:
            self._doing, self._told = progress.doing, now
            print(f"{progress.doing}, {progress.seconds:.0f} s, {progress.steps} steps", flush=True)


def record_of(result: LoadResult) -> dict[str, Any]:
    """What is kept of a result: without histograms' bytes, and some of the looks."""
    found = result.as_json()
    for name in DROPPED:
        del found[name]
    for name in ("response", "step", "layer", "forward"):
        del found[name]["encoded"]
        for shape in found["shapes"]:
            shape[name].pop("encoded", None)
    found["layers_with_an_indexer"] = len(result.geometry.layers)
    found["samples"] = {
        process: [asdict(sample) for sample in samples[:: max(1, len(samples) // KEPT_SAMPLES)]]
        for process, samples in result.samples.items()
    }
    del found["service"]["pid"], found["service"]["address"]
    return found


def run(workload: str, placement: str, changes: list[str], folder: Path) -> bool:
    """One run and its file; whether everything held."""
    changed = dict(map(parse_change, changes))
    wanted = load_workload(workload, {**changed, "load.placement": placement})
    finished = run_sessions(wanted, None, Lines().tell, threading.Event())
    result = summarise(wanted, finished)
    gpu, found = result.service.gpu, record_of(result)
    name, suffix = f"cpu-load_{wanted.name}", ""
    if gpu:
        name, suffix = card(gpu), f"-load_{wanted.name}-{result.service.placement}"
    path = write(name, gpu or processor(), found, packages=PACKAGES, suffix=suffix, folder=folder)
    for verdict in result.verdicts:
        print("ok  " if verdict.ok else "FAIL", verdict.name, verdict.detail)
    print(f"written: {path}")
    return result.ok


def main(
    workload: Annotated[
        str, typer.Argument(help="A TOML file, or one of the program's.")
    ] = "smoke",
    placement: Annotated[
        list[str] | None, typer.Option(help="One or more; cpu by default.")
    ] = None,
    change: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    results: Annotated[Path, typer.Option(help="Folder for the results files.")] = RESULTS,
    document: Annotated[list[Path] | None, typer.Option(help="Write docs from these.")] = None,
) -> None:
    if document:
        write_document(document)
        return
    held = [run(workload, each, change or [], results) for each in placement or ["cpu"]]
    raise typer.Exit(0 if all(held) else 1)


if __name__ == "__main__":
    typer.run(main)
