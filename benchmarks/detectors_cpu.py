"""What each detector costs on the CPU transport: alone, and all, against none, in turns.

    python benchmarks/detectors_cpu.py [--steps N]
    python benchmarks/detectors_cpu.py --document benchmarks/results/FILE

The hand-over's workload (one decode row over a short context, so that what is added shows), a
service process for each setting, and one worker with a session with each. Every turn runs a step of
every setting, in an order that is drawn. Beside the time that passes stands the processor time of
both sides, which other work on the machine disturbs less.
"""

import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from handoff_cpu import CONTEXT, PAGE, TOP_K, WARM_UP_STEPS, Workload
from race_documents import detectors_cpu as put_detectors
from results_file import processor, write
from rich.console import Console
from rich.table import Table

from dsa_indexer_cli.demo.service_process import ServiceProcess
from indexer_client import ClientSettings, Session, Source
from indexer_client.control_plane import ControlPlane
from ipc_handoff.addresses import UNIX
from ipc_handoff.control import WorkerControl
from ipc_handoff.detectors import ALL, NONE, Detector

LAYERS = 8
WAYS = (NONE, *Detector, ALL)


@dataclass
class Taken:
    """Of one setting, microseconds.

    Attributes:
        steps: time that passed in each.
        worker, service: processor time of all of them.
    """

    steps: list[float] = field(default_factory=list)
    worker: float = 0.0
    service: float = 0.0

    @property
    def processor(self) -> float:
        """Of a step."""
        return (self.worker + self.service) / len(self.steps)


def measure(folder: Path, steps: int) -> dict[str, Taken]:
    """By setting of both sides."""
    work = Workload(LAYERS)
    last = CONTEXT - 1
    inputs = replace(
        work.inputs,
        positions=torch.tensor([last]),
        slots=torch.tensor([int(work.inputs.block_table[0, last // PAGE]) * PAGE + last % PAGE]),
        request_ids=["request"],
    )
    out = torch.empty(1, TOP_K, dtype=torch.int32)
    taken = {str(way): Taken() for way in WAYS}
    with ExitStack() as stack:
        sides = {way: _sides(stack, folder / way, work, way) for way in taken}

        def step(session: Session) -> tuple[float, float]:
            queries = [work.query() for _ in range(LAYERS)]
            began, used = time.perf_counter_ns(), time.thread_time_ns()
            with session.step(inputs) as current:
                for layer, (q, weights) in enumerate(queries):
                    if current.select(layer, q, weights, out=out) is not Source.SERVICE:
                        raise RuntimeError("the service did not answer")
                    current.share(layer, out)
            used = time.thread_time_ns() - used
            return (time.perf_counter_ns() - began) / 1000, used / 1000

        order = list(taken)
        for turn in range(WARM_UP_STEPS + steps):
            if turn == WARM_UP_STEPS:
                before = {way: _processor_time(service) for way, (_, service) in sides.items()}
            random.shuffle(order)
            for way in order:
                passed, used = step(sides[way][0])
                if turn >= WARM_UP_STEPS:
                    taken[way].steps.append(passed)
                    taken[way].worker += used
        for way, (_, service) in sides.items():
            taken[way].service = _processor_time(service) - before[way]
    return taken


def _processor_time(process: int) -> float:
    """Microseconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # of the user, of the system
    return ticks * 1e6 / os.sysconf("SC_CLK_TCK")


def _sides(stack: ExitStack, folder: Path, work: Workload, way: str) -> tuple[Session, int]:
    """An attached session, and the number of its service's process."""
    folder.mkdir()
    address = f"{UNIX}{folder / 'sockets' / 'indexer.sock'}"
    command = [sys.executable, "-m", "dsa_indexer_cli", "serve", "--address", address]
    service = ServiceProcess(address, None, folder / "log", [*command, "--detectors", way])
    service.start()
    stack.callback(service.stop)
    settings = ClientSettings(address=address, detectors=way)
    session = Session(work.geometry, work.k_caches, work.inline, settings=settings)
    session.start()
    stack.callback(session.close)
    session.wait_attached(10)
    status = ControlPlane(settings)
    stack.callback(status.close)
    return session, status.get_status().pid


def words_microseconds(work: Workload, runs: int = 20_000) -> float:
    """Of the generations of one layer, which are written whatever the setting is."""
    control = WorkerControl(memoryview(bytearray(work.geometry.control.size)), work.geometry)
    control.start(1)
    generations = control.generations
    began = time.perf_counter_ns()
    for step in range(runs):
        for slots in (generations.layers, generations.answers):
            slots.begin(step, 1)
            slots.end(step, 1)
    return (time.perf_counter_ns() - began) / 1000 / runs


def main(
    steps: Annotated[int, typer.Option(min=50, help="Timed steps of each setting.")] = 1000,
    document: Annotated[Path | None, typer.Option(help="Write docs from this file.")] = None,
) -> None:
    """Measure, print a table, write benchmarks/results."""
    if document is not None:
        put_detectors(document)
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as the service
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(Path(folder), steps)
    found: dict[str, Any] = {}
    table = Table("detectors", "step p50 µs", "processor time µs", "more than without µs", "%")
    none = taken[NONE]
    for way, one in taken.items():
        added = one.processor - none.processor
        percent = 100 * added / none.processor
        turns = zip(one.steps, none.steps, strict=True)
        found[way] = {
            "step_p50_us": round(median(one.steps), 1),
            "step_added_p50_us": round(median(here - there for here, there in turns), 1),
            "processor_us": round(one.processor, 1),
            "processor_added_us": round(added, 1),
            "processor_added_percent": round(percent, 2),
        }
        table.add_row(
            way, f"{median(one.steps):.0f}", f"{one.processor:.0f}", f"{added:+.0f}",
            f"{percent:+.1f}",
        )  # fmt: skip
    words = words_microseconds(Workload(LAYERS))
    found["generations written, a layer, both sides (us)"] = round(words, 2)
    found["layers"], found["steps"] = LAYERS, steps
    console = Console()
    console.print(table)
    console.print(f"generations, written in any case: {words:.2f} µs a layer on both sides")
    console.print(f"written to {write('cpu-detectors', processor(), found)}")


if __name__ == "__main__":
    typer.run(main)
