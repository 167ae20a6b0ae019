"""Runs the lab on a GPU."""

import logging
import math
import time
from pathlib import Path

from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.clean import CLEAN, whole
from dsa_indexer_cli.racelab.cuda_bench import PATIENT, CudaBench, cuda_bench
from dsa_indexer_cli.racelab.cuda_races import PROVOCATIONS
from dsa_indexer_cli.racelab.provocation import Progress, provoke
from dsa_indexer_cli.racelab.result import Clean, LabResult
from dsa_indexer_cli.racelab.run import look

logger = logging.getLogger(__name__)

_PART_SECONDS = 30.0
"""A part's service starts, and its races are provoked, in so many."""
_FAILED = 2000
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
    seconds: float = math.inf,
) -> LabResult:
    """As `run_lab`, with two processes that share the first GPU under MPS.

    What cannot be run is named in the result, and costs the rest nothing.

    Args:
        log: of the services.
        seconds: for all of it. When they are over, races are provoked less often, once at least,
            and clean steps end; what was run is in the result.
    """
    began = time.monotonic()
    result = LabResult("cuda", detectors)
    parts = list(dict.fromkeys(race.terms for race in PROVOCATIONS))
    for place, terms in enumerate(parts):
        chosen = [race for race in PROVOCATIONS if race.terms == terms]
        left = began + seconds - time.monotonic()
        try:
            with cuda_bench(terms, log, detectors) as made:
                # Other parts have few races: a service's start is most of what they take.
                own = left - _PART_SECONDS * (len(parts) - 1 - place)
                until = time.monotonic() + max(own, 0.0)
                if terms is PATIENT and clean_steps:
                    result.clean = _clean(made, clean_steps, progress, max(own, 0.0) / 2)
                rest = until - time.monotonic()
                result.provoked += provoke(made, chosen, provocations, progress, rest)
        except Exception as error:
            logger.debug("a part of the lab failed", exc_info=True)
            named = ", ".join(race.name for race in chosen)
            result.failed.append(f"{named}: {type(error).__name__}: {error}"[:_FAILED])
    result.seconds = time.monotonic() - began
    return result


def _clean(made: CudaBench, steps: int, progress: Progress, seconds: float) -> Clean:
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
        if time.monotonic() > began + seconds:
            break
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
    taken = time.monotonic() - began
    found.milliseconds = taken / max(sum(found.steps.values()), 1) * 1000
    found.inline_layers = made.indexer.statistics.inline_layers - before
    return found
