"""The long run of `dsa-indexer racelab`, kept as a results file.

    python benchmarks/race_lab.py [--provocations N] [--clean-steps N] [--device cuda]
    python benchmarks/race_lab.py --document benchmarks/results/FILE

Ends with status 1 if a race was missed or a clean step raised an alarm.
"""

import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import typer
from race_documents import race_lab
from results_file import RESULTS, card, processor, write

from dsa_indexer_cli.mps import is_served, run_under_mps
from dsa_indexer_cli.racelab.run import run_lab

PACKAGES = ("dsa-indexer", "torch", "triton", "grpcio", "protobuf")


def main(
    provocations: Annotated[int, typer.Option(min=1, help="Of each race.")] = 1_000,
    clean_steps: Annotated[int, typer.Option(min=0, help="In all.")] = 100_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="With cuda: end then, with what was run.")] = 540.0,
    results: Annotated[Path, typer.Option(help="Folder for the results file.")] = RESULTS,
    document: Annotated[Path | None, typer.Option(help="Write docs from this file.")] = None,
) -> None:
    """Run the lab, write benchmarks/results."""
    if document is not None:
        race_lab(document)
        return
    if device == "cpu":
        name, file = processor(), "cpu-race_lab"
        result = run_lab(provocations, clean_steps, print)
    elif not is_served():
        raise typer.Exit(run_under_mps([sys.executable, *sys.argv]))
    else:
        name = torch.cuda.get_device_name(0)
        file = card(name)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "service.log"
            cuda_run = import_module("dsa_indexer_cli.racelab.cuda_run")  # Triton
            result = cuda_run.run_cuda_lab(provocations, clean_steps, print, log, seconds=seconds)
    found = {**asdict(result), "ok": result.ok}
    suffix = "" if device == "cpu" else "-race_lab"
    written = write(file, name, found, packages=PACKAGES, suffix=suffix, folder=results)
    print(f"written: {written}")
    raise typer.Exit(0 if result.ok else 1)


if __name__ == "__main__":
    typer.run(main)
