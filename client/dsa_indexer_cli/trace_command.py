"""`dsa-indexer trace`: what a trace file says about one step, drawn, or for Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dsa_indexer_cli.output import JsonOption, console, errors, fail, print_json
from dsa_indexer_cli.trace.perfetto import write_perfetto
from dsa_indexer_cli.trace.spans import read_trace_file
from dsa_indexer_cli.trace.timeline import Timeline, timelines

_LISTED = 20
_ID = 32

Write = Callable[[Timeline, Path], None]


def trace(
    file: Annotated[Path, typer.Argument(help="JSON lines, as --trace-file writes them.")],
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a timeline that ui.perfetto.dev opens.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows a timeline.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a timeline.")] = None,
    step: Annotated[int | None, typer.Option(help="Only steps of this number.")] = None,
    trace_id: Annotated[
        str | None, typer.Option(help="Only the step whose trace's id begins so.")
    ] = None,
    finding: Annotated[
        str | None, typer.Option(help="Only steps in which this kind of finding was made.")
    ] = None,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="Draw the slowest step, instead of the newest.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the steps of a trace file; with --perfetto, --html or --png, draw the newest one."""
    found = _read(file)
    outputs: list[tuple[str, Path, Callable[[], Write]]] = [
        (name, path, writer)
        for name, path, writer in (
            ("perfetto", perfetto, lambda: write_perfetto),
            ("html", html, _html_writer),
            ("png", png, _png_writer),
        )
        if path is not None
    ]
    chosen = [
        timeline
        for timeline in found
        if step in (None, timeline.step)
        and timeline.trace.startswith(trace_id or "")
        and (finding is None or finding in {mark.name for mark in timeline.findings})
    ]
    if not chosen:
        fail(
            f"step, trace-id, finding: fit none of the {len(found)} steps in {file} (fix: leave "
            "them out to see what there is)",
            2,
        )
    if as_json:
        print_json({"steps": [_told(timeline) for timeline in chosen]})
    elif not outputs:
        _list(chosen)
    if not outputs:
        return
    drawn = max(chosen, key=lambda timeline: timeline.duration) if slowest else chosen[-1]
    for name, path, writer in outputs:
        _write(name, path, writer, drawn)
        errors.print(f"{path}: step {drawn.step}, trace {drawn.trace}", highlight=False)


def _read(file: Path) -> list[Timeline]:
    try:
        read = read_trace_file(file)
    except OSError as error:
        fail(f"file: {file}: {error.strerror} (fix: what DSA_INDEXER_TRACE_FILE names)", 2)
    if read.unreadable:
        errors.print(f"{file}: {read.unreadable} lines are no spans, left out", highlight=False)
    found = timelines(read.spans)
    if not found:
        fail(f"file: {file} holds no step (fix: run with DSA_INDEXER_TRACE_FILE set to it)", 2)
    return found


def _write(name: str, path: Path, writer: Callable[[], Write], timeline: Timeline) -> None:
    try:
        writer()(timeline, path)
    except ModuleNotFoundError as error:
        fail(f"{name}: {error.name} is missing (fix: pip install 'dsa-indexer[plots]')", 2)
    except OSError as error:
        fail(f"{name}: {path}: {error.strerror} (fix: a file that can be written)", 2)


def _html_writer() -> Write:
    from dsa_indexer_cli.trace.html import write_html

    return write_html


def _png_writer() -> Write:
    from dsa_indexer_cli.trace.png import write_png

    return write_png


def _told(timeline: Timeline) -> dict[str, Any]:
    return {
        "step": timeline.step,
        "epoch": timeline.epoch,
        "rows": timeline.rows,
        "trace": timeline.trace,
        "duration_ns": timeline.duration,
        "error": timeline.error,
        "findings": [{"kind": mark.name, **mark.attributes} for mark in timeline.findings],
    }


def _list(found: list[Timeline]) -> None:
    table = Table("step", "rows", "µs", "findings", "ended")
    table.add_column("trace", no_wrap=True, min_width=_ID)
    for timeline in found[-_LISTED:]:
        kinds = ", ".join(sorted({mark.name for mark in timeline.findings}))
        table.add_row(
            str(timeline.step),
            str(timeline.rows),
            f"{timeline.duration / 1000:,.0f}",
            kinds,
            timeline.error or "well",
            timeline.trace,
        )
    console.print(table)
    if len(found) > _LISTED:
        errors.print(f"the newest {_LISTED} of {len(found)} steps", highlight=False)


def register(app: typer.Typer) -> None:
    app.command()(trace)
