"""What detectors and traces cost on a GPU: decode steps of the hand-over's benchmark, in turns.

    python benchmarks/detectors_gpu.py [--way all --way traced ...] [--seconds N] [--results FOLDER]
    python benchmarks/detectors_gpu.py --document benchmarks/results/FILE

Starts an MPS daemon and a service for each way; one worker has a session with each. Every turn runs
a step of every way, and what a way adds is the median of the differences to `off` in the same turn.
A way whose service does not come up, or a shape for which there is no time, is named in the results
and costs the others nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer
from handoff_gpu import PACKAGES, mps, service
from handoff_workload import GEOMETRY, PAGE, Decode, Work
from race_documents import detectors_gpu as put_detectors
from results_file import RESULTS, card, write
from rich.console import Console
from rich.table import Table

from attention_worker.device_session import DeviceIndexer
from indexer_client import ClientSettings
from ipc_handoff.detectors import ALL, NONE, Detector

OFF, TRACED, BOTH = "off", "traced", "all, traced"
WAYS = (OFF, ALL, TRACED, BOTH)
"""Those that are measured if nobody says otherwise; a detector's name is one, too."""
AIMS = {ALL: 2.0, TRACED: 1.0}
"""Per cent of a step that a way may add."""
RATIO = 0.01
SHAPES = ((1, 4096), (8, 65536))
ROUNDS, UNTIMED = 100, 10
READY_SECONDS = 60.0


def settings_of(way: str, folder: Path) -> dict[str, Any]:
    """Of both sides."""
    detectors = {OFF: NONE, TRACED: NONE, BOTH: ALL}.get(way, way)
    found: dict[str, Any] = {"detectors": detectors}
    if way in (TRACED, BOTH):
        found |= {"trace_file": str(folder / f"{way}.jsonl"), "trace_ratio": RATIO}
    return found


def worker(addresses: dict[str, str], folder: Path, seconds: float) -> dict[str, Any]:
    """By shape, what `compare` says; by way, why it is not there."""
    ends = time.monotonic() + seconds
    work = Work.make(torch.device("cuda", 0))
    torch.cuda.set_stream(torch.cuda.Stream())
    found: dict[str, Any] = {"shapes": {}, "failed": {}}
    indexers: dict[str, DeviceIndexer] = {}
    try:
        for way, address in addresses.items():  # what one tunes, the others find
            try:
                indexers[way] = _session(work, way, address, folder)
            except Exception as error:
                found["failed"][way] = f"{type(error).__name__}: {error}"[-1000:]
        for requests, context in SHAPES:
            name = f"{requests} x {context}"
            if time.monotonic() > ends:
                found["failed"][name] = f"no time left of {seconds:.0f} s"
                continue
            try:
                found["shapes"][name] = _shape(work, indexers, requests, context, ends)
            except Exception as error:
                found["failed"][name] = f"{type(error).__name__}: {error}"[-1000:]
    finally:
        for indexer in indexers.values():
            indexer.close()
    return found


def _session(work: Work, way: str, address: str, folder: Path) -> DeviceIndexer:
    (folder / "worker").mkdir(exist_ok=True)
    settings = ClientSettings(
        address=address,
        placement="mps",
        rpc_timeout_seconds=60.0,
        **settings_of(way, folder / "worker"),
    )
    indexer = DeviceIndexer(GEOMETRY, work.k_caches, device=work.device, settings=settings)
    try:
        indexer.start()
        indexer.wait_attached(READY_SECONDS)
    except BaseException:
        indexer.close()
        raise
    return indexer


def _shape(
    work: Work, indexers: dict[str, DeviceIndexer], requests: int, context: int, ends: float
) -> dict[str, Any]:
    decodes = {}
    for way, indexer in indexers.items():
        made = decodes[way] = Decode(work, indexer, requests, context, True)
        lengths = made.inputs.seq_lens
        table = made.inputs.block_table
        last = (lengths - 1).to(torch.int64)
        pages = table.gather(1, (last // PAGE).unsqueeze(1)).squeeze(1).to(torch.int64)
        made.inputs = replace(made.inputs, positions=last, slots=pages * PAGE + last % PAGE)
    steps: dict[str, list[float]] = {way: [] for way in decodes}
    begins: dict[str, list[float]] = {way: [] for way in decodes}
    before = {way: indexer.statistics.answered_layers for way, indexer in indexers.items()}
    turns = 0
    ways = list(decodes)
    while turns < UNTIMED + ROUNDS and (turns <= UNTIMED + 1 or time.monotonic() < ends):
        work.change(turns, requests)
        first = turns % len(ways)
        for way in ways[first:] + ways[:first]:
            taken, begin = _step(decodes[way])
            if turns >= UNTIMED:
                steps[way].append(taken)
                begins[way].append(begin)
        turns += 1
    answered = {
        way: indexer.statistics.answered_layers - before[way] for way, indexer in indexers.items()
    }
    whole = turns * len(GEOMETRY.layers)
    return {
        "answered": all(count == whole for count in answered.values()),
        "ways": compare(steps, begins),
    }


def _step(decode: Decode) -> tuple[float, float]:
    """µs of a step, from before `begin_step` to the end of its last kernel, and of `begin_step`."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    began = time.perf_counter_ns()
    decode.begin()
    begin = (time.perf_counter_ns() - began) / 1e3
    decode.graph.replay()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3, begin


def compare(
    steps: dict[str, list[float]], begins: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Of each way: a step's median and 95th percentile, and `begin_step`'s median, µs; what it adds
    to `off` in the same turn, per cent of `off`'s median, if that was measured.
    """
    found = {}
    for way, taken in steps.items():
        one = found[way] = {
            "steps": float(len(taken)),
            "step_us": median(taken),
            "step_p95_us": quantiles(taken, n=20)[18] if len(taken) > 1 else taken[0],
            "begin_step_us": median(begins[way]),
        }
        if OFF in steps:
            added = median(own - off for own, off in zip(taken, steps[OFF], strict=True))
            one["added_percent"] = 100 * added / median(steps[OFF])
    return found


def show(found: dict[str, Any]) -> None:
    """A short table, and what was not measured."""
    console = Console()
    for shape, one in found["shapes"].items():
        table = Table(f"requests x context: {shape}", "step p50, µs", "added, %", "aim, %")
        for way, of in one["ways"].items():
            added = f"{of['added_percent']:+.2f}" if "added_percent" in of else ""
            table.add_row(way, f"{of['step_us']:.1f}", added, str(AIMS.get(way, "")))
        console.print(table, f"all layers answered: {one['answered']}")
    for name, why in found["failed"].items():
        console.print(f"not measured: {name}: {why}", markup=False)


def main(
    way: Annotated[list[str] | None, typer.Option(help="Besides off: these only.")] = None,
    seconds: Annotated[float, typer.Option(help="Shapes end then, once begun.")] = 200.0,
    results: Annotated[Path, typer.Option(help="Folder for the results file.")] = RESULTS,
    as_worker: Annotated[str, typer.Option(hidden=True)] = "",
    document: Annotated[Path | None, typer.Option(help="Write docs from this file.")] = None,
) -> None:
    """Measure, print, write benchmarks/results."""
    if document is not None:
        put_detectors(document)
        return
    if as_worker:
        asked = json.loads(as_worker)
        print(json.dumps(worker(asked["addresses"], Path(asked["folder"]), seconds)), flush=True)
        return
    ways = (OFF, *way) if way else WAYS
    if unknown := set(ways) - {*WAYS, *Detector}:
        known = ", ".join((*WAYS, *Detector))
        raise typer.BadParameter(f"way: {min(unknown)} (fix: one of {known})")
    with tempfile.TemporaryDirectory() as folder, mps(Path(folder) / "mps") as environment:
        found = measure(dict.fromkeys(ways), Path(folder), environment, seconds)
    show(found)
    name = torch.cuda.get_device_name(0)
    path = write(card(name), name, found, packages=PACKAGES, suffix="-detectors", folder=results)
    print(f"written: {path}")
    if not found["shapes"]:
        raise typer.Exit(1)


def measure(
    ways: Sequence[str] | dict[str, None], folder: Path, environment: dict[str, str], seconds: float
) -> dict[str, Any]:
    """What a worker measured; services that do not come up are named in it."""
    began = time.monotonic()
    failed, addresses = {}, {}
    with ExitStack() as stack:
        for number, way in enumerate(ways):
            own = folder / str(number)
            own.mkdir()
            variables = {
                f"DSA_INDEXER_{name.upper()}": str(value)
                for name, value in settings_of(way, own).items()
            }
            try:
                running = service(own, 0, {**environment, **variables})
                addresses[way] = stack.enter_context(running)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                failed[way] = str(error)[-1000:]
        left = max(seconds - (time.monotonic() - began), 1.0)
        asked = json.dumps({"addresses": addresses, "folder": str(folder)})
        command = [sys.executable, __file__, "--seconds", str(left), "--as-worker", asked]
        found: dict[str, Any] = {"shapes": {}, "failed": {}}
        try:
            done = subprocess.run(
                command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True,
                check=True, timeout=left + 2 * READY_SECONDS,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            found["failed"]["worker"] = f"{type(error).__name__}: {error}"[-1000:]
    found["failed"] |= failed
    return found


if __name__ == "__main__":
    typer.run(main)
