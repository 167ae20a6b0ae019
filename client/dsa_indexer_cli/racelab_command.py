"""`dsa-indexer racelab`: races on purpose, and whether the detectors name them."""

import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status
from rich.table import Table

from dsa_indexer_cli.ending import any_end_as_by_ctrl_c
from dsa_indexer_cli.mps import is_served, run_under_mps
from dsa_indexer_cli.output import JsonOption, console, errors, fail, print_json
from dsa_indexer_cli.racelab.provocation import Progress
from dsa_indexer_cli.racelab.result import LabResult


def racelab(
    provocations: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How often each race is provoked.")
    ] = 20,
    clean_steps: Annotated[
        int, typer.Option(min=0, max=100_000_000, help="Steps in which nothing races.")
    ] = 2_000,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: two processes on the first GPU, under MPS.")
    ] = "cpu",
    trace_file: Annotated[
        Path | None,
        typer.Option(help="Append the traces of steps that raced: for `trace`. On a CPU."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="With cuda: end then, with what was run so far."),
    ] = 220.0,
    as_json: JsonOption = False,
) -> None:
    """Provoke every race that the detectors know; then run clean steps.

    On a CPU both sides run in this process, over the memory, rings and doorbells that two
    processes would share; on a GPU a service is started, and an MPS daemon where there is none.
    Ends with status 0 only if all was run, every race was caught in the step that raced, and clean
    steps raised no alarm.
    """
    from indexer_client import IndexerError

    if device not in ("cpu", "cuda"):
        fail(f"device: {device} (fix: cpu or cuda)", 2)
    if device == "cuda" and trace_file is not None:
        fail("trace_file: not with --device cuda (fix: leave one of them out)", 2)
    logging.basicConfig(level=logging.CRITICAL)
    if device == "cuda" and not is_served():
        options = {
            "--device": device,
            "--provocations": provocations,
            "--clean-steps": clean_steps,
            "--seconds": seconds,
        }
        words = [str(word) for option in options.items() for word in option]
        try:
            words += as_json * ["--json"]
            ended = run_under_mps([sys.executable, "-m", "dsa_indexer_cli", "racelab", *words])
        except RuntimeError as error:
            fail(str(error))
        raise typer.Exit(ended)
    with any_end_as_by_ctrl_c(), Status("", console=errors) as status:
        try:
            result = _run(device, provocations, clean_steps, trace_file, seconds, status.update)
        except (IndexerError, RuntimeError) as error:
            fail(str(error))
        except OSError as error:
            if trace_file is None:
                raise
            fail(f"trace_file: {error} (fix: a file that can be written)", 2)
    if as_json:
        print_json({**asdict(result), "ok": result.ok})
    else:
        _show(result)
    if not result.ok:
        raise typer.Exit(1)


def _run(
    device: str,
    provocations: int,
    clean_steps: int,
    trace_file: Path | None,
    seconds: float,
    progress: Progress,
) -> LabResult:
    if device == "cpu":
        from dsa_indexer_cli.racelab.run import run_lab

        return run_lab(provocations, clean_steps, progress, trace_file=trace_file)
    from dsa_indexer_cli.racelab.cuda_run import run_cuda_lab  # Triton: only where it is used

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "service.log"
        return run_cuda_lab(provocations, clean_steps, progress, log, seconds=seconds)


def _show(result: LabResult) -> None:
    races = Table("race", "found as", "seen in", "caught")
    for race in result.provoked:
        count = f"{race.caught} of {race.provoked}"
        count = f"[red]{count}[/red]" if race.missed else count
        races.add_row(race.name, race.kind, "\n".join(race.stages), count)
    steps = Table("clean steps", "")
    for name, run in result.clean.steps.items():
        steps.add_row(name, str(run))
    console.print(races, steps)
    for failure in result.failed:
        console.print("failed:", failure, style="red", markup=False)
    for example in result.clean.examples:
        console.print("false alarm:", example, style="red", markup=False)
    clean = result.clean
    console.print(
        f"{sum(race.missed for race in result.provoked)} missed; {clean.false_alarms} false alarms "
        f"in {sum(clean.steps.values())} clean steps, {clean.wrong} of {clean.compared} compared "
        f"answers wrong; {result.seconds:.1f} s"
    )


def register(app: typer.Typer) -> None:
    app.command()(racelab)
