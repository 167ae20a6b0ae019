"""A load test on the console: how far it is, and in the end what it found."""

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from dsa_indexer_cli.load.durations import duration
from dsa_indexer_cli.load.histograms import Times
from dsa_indexer_cli.load.result import LoadResult
from dsa_indexer_cli.load.run import Progress
from dsa_indexer_cli.output import console, errors

_LINE_SECONDS = 10.0


class ConsoleProgress:
    """A bar where there is a terminal; else a line every ten seconds."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[found]}"),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, found="")
        self._told = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def tell(self, progress: Progress) -> None:
        found = ""
        if progress.of_seconds:
            found = (
                f"{progress.seconds:.0f} of {progress.of_seconds:.0f} s, {progress.steps} steps, "
                f"{progress.steps_a_second:.0f}/s, p50 {duration(progress.p50)}, "
                f"p99 {duration(progress.p99)}"
            )
            if progress.failures:
                found += f", {progress.failures} FAILED"
        self._bar.update(
            self._task,
            description=progress.doing,
            total=progress.of_seconds or None,
            completed=progress.seconds,
            found=found,
        )
        if not errors.is_terminal and progress.seconds >= self._told + _LINE_SECONDS:
            self._told = progress.seconds
            errors.print(found, highlight=False, soft_wrap=True)


def show(result: LoadResult, report: Path | None) -> None:
    load, service = result.workload.load, result.service
    loops = {
        "open": f"open loop, {load.rate:g} steps/s each",
        "closed": "closed loop",
        "recorded": "steps as recorded",
    }
    where = f"on {service.gpu}, {service.placement}" if service.gpu else "on the CPU"
    asked = f"against {service.engine} {service.version} (pid {service.pid})"
    console.print(
        f"{result.workload.name}: {load.sessions} sessions, {loops[load.mode]}, "
        f"{result.seconds:.1f} s {asked if service.address else 'without a service'}, {where}",
        highlight=False,
    )
    console.print(
        f"{result.steps} steps, {result.steps_a_second:.1f}/s; {result.rows_a_second:.0f} rows/s; "
        f"{result.layers} selections",
        highlight=False,
    )
    console.print(_times(result), _shapes(result), _verdicts(result))
    if report is not None:
        console.print(f"report: {report}", highlight=False, soft_wrap=True)


def _times(result: LoadResult) -> Table:
    table = Table("step", "count", "mean", "p50", "p90", "p99", "p99.9", "most")
    rows: list[tuple[str, Times]] = [("from its beginning", result.step)]
    if result.is_open_loop:
        rows.insert(0, ("from its arrival", result.response))
    if result.forward.count:
        rows.append(("on the GPU", result.forward))
    for name, times in [*rows, ("one layer", result.layer)]:
        if times.count:
            values = (times.mean, times.p50, times.p90, times.p99, times.p999, times.most)
            table.add_row(name, str(times.count), *map(duration, values))
    return table


def _shapes(result: LoadResult) -> Table:
    head = ["steps", "req. ≤", "context ≤", "count", "p50", "p99", "layer p50", "p99"]
    if on_gpu := bool(result.forward.count):
        head += ["GPU p50", "p99", "a layer"]
    table = Table(*head)
    for shape in result.shapes:
        times = [shape.response, shape.layer, *([shape.forward] if on_gpu else [])]
        values = [duration(v) if t.count else "" for t in times for v in (t.p50, t.p99)]
        if on_gpu:
            values.append(duration(shape.forward.p50 / len(result.geometry.layers)))
        counts = (shape.requests, shape.context, shape.steps)
        table.add_row(shape.kind, *map(str, counts), *values)
    return table


def _verdicts(result: LoadResult) -> Table:
    table = Table("must hold", "", "found")
    for verdict in result.verdicts:
        mark = "ok" if verdict.ok else "[red]FAIL[/red]"
        table.add_row(verdict.name, mark, Text(verdict.detail))
    return table
