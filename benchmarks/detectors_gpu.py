"""What the detectors cost on a GPU: decode steps of the hand-over's benchmark, on and off in turns.

    python benchmarks/detectors_gpu.py [--results FOLDER]
    python benchmarks/detectors_gpu.py --document benchmarks/results/FILE

Starts an MPS daemon, a service with all detectors and one with none; one worker has a session with
each. On a GPU the guard of inputs is a kernel that both have, so that what differs is the host's
work: what is told, and what is looked at between steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer
from handoff_gpu import PACKAGES, mps, service
from handoff_workload import GEOMETRY, Decode, Work
from race_documents import detectors_gpu as put_detectors
from results_file import RESULTS, write

from attention_worker.device_session import DeviceIndexer
from indexer_client import ClientSettings

SHAPES = ((1, 4096), (8, 65536))
ROUNDS, UNTIMED = 60, 10
READY_SECONDS, WORKER_SECONDS = 240.0, 400
WAYS = ("all", "none")


def worker(addresses: dict[str, str]) -> dict[str, Any]:
    """Median and 95th percentile, µs, of a step's GPU time and of `begin_step`, by shape."""
    work = Work.make(torch.device("cuda", 0))
    torch.cuda.set_stream(torch.cuda.Stream())
    indexers = {
        way: DeviceIndexer(
            GEOMETRY, work.k_caches, device=work.device,
            settings=ClientSettings(
                address=address, placement="mps", detectors=way, rpc_timeout_seconds=60.0
            ),
        )
        for way, address in addresses.items()
    }  # fmt: skip
    found: dict[str, Any] = {}
    try:
        for indexer in indexers.values():  # one after the other: what one tunes, both find
            indexer.start()
            indexer.wait_attached(READY_SECONDS)
        for requests, context in SHAPES:
            found[f"{requests} x {context}"] = _shape(work, indexers, requests, context)
    finally:
        for indexer in indexers.values():
            indexer.close()
    return found


def _shape(
    work: Work, indexers: dict[str, DeviceIndexer], requests: int, context: int
) -> dict[str, Any]:
    decodes = {
        way: Decode(work, indexer, requests, context, True) for way, indexer in indexers.items()
    }
    steps: dict[str, list[float]] = {way: [] for way in decodes}
    begins: dict[str, list[float]] = {way: [] for way in decodes}
    before = {way: indexer.statistics.answered_layers for way, indexer in indexers.items()}
    for turn in range(UNTIMED + ROUNDS):
        work.change(turn, requests)
        order = list(decodes.items())
        for way, decode in order if turn % 2 else reversed(order):
            began = time.perf_counter_ns()
            decode.begin()
            begin = (time.perf_counter_ns() - began) / 1e3
            taken = decode.replay()
            if turn >= UNTIMED:
                steps[way].append(taken)
                begins[way].append(begin)
    answered = {
        way: indexer.statistics.answered_layers - before[way] for way, indexer in indexers.items()
    }
    whole = (UNTIMED + ROUNDS) * len(GEOMETRY.layers)
    on, off = median(steps["all"]), median(steps["none"])
    return {
        "answered": all(count == whole for count in answered.values()),
        "step_us": {
            way: [median(taken), quantiles(taken, n=20)[18]] for way, taken in steps.items()
        },
        "begin_step_us": {way: median(taken) for way, taken in begins.items()},
        "step_ratio": on / off,
    }


def main(
    results: Annotated[Path, typer.Option(help="Folder for the results file.")] = RESULTS,
    as_worker: Annotated[str, typer.Option(hidden=True)] = "",
    document: Annotated[Path | None, typer.Option(help="Write docs from this file.")] = None,
) -> None:
    """Measure, print, write benchmarks/results."""
    if document is not None:
        put_detectors(document)
        return
    if as_worker:
        print(json.dumps(worker(json.loads(as_worker))), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder, mps(Path(folder) / "mps") as environment:
        found = _measure(Path(folder), environment)
    print(json.dumps(found, indent=1))
    name = torch.cuda.get_device_name(0)
    card = name.removeprefix("NVIDIA ").lower().replace(" ", "-")
    path = write(card, name, found, packages=PACKAGES, suffix="-detectors", folder=results)
    print(f"written: {path}")


def _measure(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    for way in WAYS:
        (folder / way).mkdir()
    all_on, none_on = ({**environment, "DSA_INDEXER_DETECTORS": way} for way in WAYS)
    with (
        service(folder / "all", 0, all_on) as with_all,
        service(folder / "none", 0, none_on) as with_none,
    ):
        addresses = json.dumps({"all": with_all, "none": with_none})
        done = subprocess.run(
            [sys.executable, __file__, "--as-worker", addresses],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True,
            timeout=WORKER_SECONDS,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    typer.run(main)
