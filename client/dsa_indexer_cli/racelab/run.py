"""Runs the lab: every provocation many times, then clean steps."""

import time
from collections.abc import Sequence
from pathlib import Path

from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.bench import PATIENT, Bench, Bounds, bench
from dsa_indexer_cli.racelab.clean import CleanSteps
from dsa_indexer_cli.racelab.provocation import AnyBench, Progress, Provocation, provoke
from dsa_indexer_cli.racelab.races import PROVOCATIONS
from dsa_indexer_cli.racelab.result import Clean, LabResult

_EXAMPLES = 5
_TOLD = 500
# Findings are kept until they are looked at.
_LOOKED_AT = 1000


def run_lab(
    provocations: int,
    clean_steps: int,
    progress: Progress,
    *,
    detectors: str = "all",
    races: Sequence[Provocation[Bench, Bounds]] = PROVOCATIONS,
    trace_file: Path | None = None,
) -> LabResult:
    """Run everything on the CPU transport.

    Args:
        provocations: of each race.
        clean_steps: in all.
        progress: told what is being done.
        detectors: the setting of both sides.
        races: those that are provoked.
        trace_file: gets the spans of the steps that raced.

    Raises:
        IndexerError: the session could not attach again.
    """
    began = time.monotonic()
    result = LabResult("cpu", detectors)
    for bounds in dict.fromkeys(race.terms for race in races):
        with bench(detectors, bounds, trace_file=trace_file) as made:
            chosen = [race for race in races if race.terms == bounds]
            result.provoked += provoke(made, chosen, provocations, progress)
    if clean_steps:
        with bench(detectors, PATIENT, seed=2) as made:
            result.clean = _clean(made, clean_steps, progress)
    result.seconds = time.monotonic() - began
    return result


def _clean(made: Bench, steps: int, progress: Progress) -> Clean:
    found, running = Clean(), CleanSteps(made)
    made.forget()
    began = time.monotonic()
    for number in range(steps):
        running.step(number)
        if number % _TOLD == 0:
            progress(f"clean step {number} of {steps}")
        if number % _LOOKED_AT == 0:
            look(made, found)
    made.run(made.batch(Sort()))
    found.milliseconds = (time.monotonic() - began) / steps * 1000
    look(made, found)
    statistics = [session.statistics for session in (made.session, made.draft)]
    found.inline_layers = sum(one.inline_layers for one in statistics)
    found.steps, found.compared, found.wrong = running.run, running.compared, running.wrong
    return found


def look(made: AnyBench, found: Clean) -> None:
    """Count what was told, and keep the first ones."""
    alarms = made.findings()
    made.forget()
    found.false_alarms += len(alarms)
    room = _EXAMPLES - len(found.examples)
    found.examples += [f"{side}: {finding}" for side, finding in alarms[: max(room, 0)]]
