"""What each detector does in a clean step on the CPU transport, timed by itself.

    python benchmarks/detector_pieces.py
    python benchmarks/detector_pieces.py --document benchmarks/results/FILE

The least of many runs, which other work on the machine disturbs least.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from handoff_cpu import CONTEXT
from race_documents import detector_pieces as put_pieces
from results_file import processor, write

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.racelab.batches import Sort, geometry, make
from indexer_client.selection_stamps import Selection, SelectionStamps
from indexer_client.step_findings import WorkerFindings
from indexer_service.step_findings import ServiceFindings
from ipc_handoff.control import WorkerControl
from ipc_handoff.detectors import ALL, Detection, detectors
from ipc_handoff.findings import Findings
from ipc_handoff.generations import Generation

_RUNS, _CALLS = 300, 20
_ROWS, _KEYS = 4, CONTEXT


def least_microseconds(work: Callable[[], object]) -> float:
    """Of one call."""
    least = float("inf")
    for _ in range(_RUNS):
        began = time.perf_counter_ns()
        for _ in range(_CALLS):
            work()
        least = min(least, time.perf_counter_ns() - began)
    return least / _CALLS / 1000


def pieces() -> dict[str, float]:
    """Microseconds, both sides together, by detector and by what it is done for."""
    of = geometry(heads=16, page_size=64, top_k=64, max_context=CONTEXT)
    detection = Detection(Findings(), detectors(ALL))
    worker, service = WorkerFindings(detection, of.layers), ServiceFindings(detection, of.layers)
    inputs = make(of, Sort(_ROWS), torch.Generator().manual_seed(1))
    report, plan = pb.StepReport(), pb.StepPlan(step=1, epoch=1)
    control = WorkerControl(memoryview(bytearray(of.control.size)), of)
    control.start(1)
    generations, wanted = control.generations, Generation(1, 0)
    for slots in (generations.inputs, generations.layers, generations.answers):
        slots.end(1)
    out, stamps = torch.zeros(_ROWS, 64, dtype=torch.int32), SelectionStamps()
    scores = torch.randn(_ROWS, _KEYS)

    def told() -> None:
        worker.report(report)
        service.faults(report)

    def twice(slots: object) -> Callable[[], bool]:
        look = slots.of  # type: ignore[attr-defined]
        return lambda: look(1) == wanted and look(1) == wanted

    def nan() -> None:
        marked = service.nan_rows(_ROWS)
        assert marked is not None
        marked[slice(0, _ROWS)] |= scores.amax(1).isnan()
        service.nan_scores(plan, 0, marked, inputs.query_start)

    def written() -> None:
        for slots in (generations.layers, generations.answers):
            slots.begin(1)
            slots.end(1)

    def shared() -> None:
        stamps.stamp(out, Selection(1, 0))
        stamps.of(out)

    layer_checks = (twice(generations.layers), twice(generations.answers))
    timed: dict[str, Callable[[], object]] = {
        "inputs, a step": told,
        "positions, a step": lambda: worker.inputs(1, 1, inputs, of.page_size),
        "generations looked at, a step": twice(generations.inputs),
        "generations looked at, a layer": lambda: [check() for check in layer_checks],
        "shared_indices, a layer": shared,
        "nan_scores, a layer": nan,
        "generations written in any case, a layer": written,
    }
    return {name: round(least_microseconds(work), 2) for name, work in timed.items()}


def main(
    document: Annotated[Path | None, typer.Option(help="Write docs from this file.")] = None,
) -> None:
    """Time them, print, write benchmarks/results."""
    if document is not None:
        put_pieces(document)
        return
    torch.set_num_threads(1)
    found = {"rows": _ROWS, "keys": _KEYS, "microseconds": pieces()}
    print(found)
    print(f"written to {write('cpu-detector_pieces', processor(), found)}")


if __name__ == "__main__":
    typer.run(main)
