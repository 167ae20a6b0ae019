"""`dsa-indexer demo`: the whole system on recorded data, on any machine."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status
from rich.table import Table

from dsa_indexer_cli.demo.result import DemoResult
from dsa_indexer_cli.ending import any_end_as_by_ctrl_c
from dsa_indexer_cli.output import JsonOption, console, errors, fail, print_json


def demo(
    trace_file: Annotated[Path, typer.Option(help="Where the spans go, as JSON lines.")] = Path(
        "dsa-indexer-demo.trace.jsonl"
    ),
    steps: Annotated[
        int, typer.Option(min=10, max=10_000, help="Decode steps that all differ.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Start the service, replay a step recorded inside vLLM, kill the service, compare all.

    Ends with status 0 only if every comparison holds.
    """
    from dsa_indexer_cli.demo.run import run_demo
    from indexer_client import IndexerError

    logging.basicConfig(level=logging.ERROR)
    trace_file = trace_file.resolve()
    with any_end_as_by_ctrl_c(), Status("", console=errors) as status:
        try:
            result = run_demo(trace_file, steps, status.update)
        except (IndexerError, RuntimeError) as error:
            fail(str(error))
        except OSError as error:
            fail(f"trace_file: {error} (fix: --trace-file in a folder that can be written)", 2)
    if as_json:
        print_json({**asdict(result), "trace_file": str(trace_file), "ok": result.ok})
    else:
        _show(result)
    if not result.ok:
        raise typer.Exit(1)


def _show(result: DemoResult) -> None:
    times = Table("stage", "process", "spans", "incomplete", "p50 µs", "p99 µs")
    for stage in result.stages:
        times.add_row(
            stage.stage,
            stage.process,
            str(stage.spans),
            str(stage.incomplete),
            f"{stage.p50:.0f}",
            f"{stage.p99:.0f}",
        )
    checks = Table("compared", "", "found")
    for check in result.checks:
        checks.add_row(check.name, "ok" if check.ok else "[red]FAIL[/red]", check.detail)
    console.print(times, checks)
    verdict = "everything holds" if result.ok else "[red]not everything holds[/red]"
    console.print(f"{verdict}, {result.seconds:.1f} s; trace: {result.trace_file}")


def register(app: typer.Typer) -> None:
    app.command()(demo)
