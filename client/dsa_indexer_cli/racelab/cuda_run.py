"""Runs the lab on a GPU."""

import time
from pathlib import Path

from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.clean import CLEAN, whole
from dsa_indexer_cli.racelab.cuda_bench import PATIENT, CudaBench, cuda_bench
from dsa_indexer_cli.racelab.cuda_races import PROVOCATIONS
from dsa_indexer_cli.racelab.provocation import Progress, provoke
from dsa_indexer_cli.racelab.result import Clean, LabResult
from dsa_indexer_cli.racelab.run import look

_BATCHES = 20
_TOLD = 500
# Steps that are enqueued one behind the other: those of an engine overlap too.
_AHEAD = 16


def run_cuda_lab(
    provocations: int,
    clean_steps: int,
    progress: Progress,
    log: Path,
    *,
    detectors: str = "all",
) -> LabResult:
    """As `run_lab`, with two processes that share the first GPU under MPS.

    Args:
        log: of the services.

    Raises:
        RuntimeError: no MPS daemon serves the GPU, or a service does not come up.
        IndexerError: the session could not attach.
    """
    began = time.monotonic()
    result = LabResult("cuda", detectors)
    for terms in dict.fromkeys(race.terms for race in PROVOCATIONS):
        progress("starting a service")
        with cuda_bench(terms, log, detectors) as made:
            if terms is PATIENT and clean_steps:
                result.clean = _clean(made, clean_steps, progress)
            chosen = [race for race in PROVOCATIONS if race.terms == terms]
            result.provoked += provoke(made, chosen, provocations, progress)
    result.seconds = time.monotonic() - began
    return result


def _clean(made: CudaBench, steps: int, progress: Progress) -> Clean:
    """Steps of every sort, by turns, each begun while those before it run."""
    sorts = {clean.name: clean.batches for clean in CLEAN if clean.run is whole}
    names = list(sorts)
    inputs = {
        name: [made.batch(sort) for sort in sorts[name] for _ in range(_BATCHES)] for name in names
    }
    found = Clean(steps=dict.fromkeys(names, 0))
    before = made.indexer.statistics.inline_layers
    began = time.monotonic()
    for number in range(steps):
        name = names[number % len(names)]
        turn = found.steps[name]
        chosen = inputs[name][turn % len(inputs[name])]
        if number % _AHEAD == 0:
            made.run(chosen)
        else:
            made.begin(chosen)
            made.select(chosen.rows)
        found.steps[name] += 1
        if number % _TOLD == 0:
            progress(f"clean step {number} of {steps}")
            look(made, found)
    made.run(made.batch(Sort()))
    made.wait_for_reports()
    look(made, found)
    found.milliseconds = (time.monotonic() - began) / steps * 1000
    found.inline_layers = made.indexer.statistics.inline_layers - before
    return found
