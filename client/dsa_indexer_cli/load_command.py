"""`dsa-indexer load`: load and soak tests of a service, without an engine."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dsa_indexer_cli.ending import when_asked_to_end
from dsa_indexer_cli.output import JsonOption, fail, print_json
from dsa_indexer_cli.status import AddressOption, client_settings


def load(
    workload: Annotated[
        str, typer.Argument(help="A TOML file, or decode, deepseek, mixed, smoke or soak.")
    ] = "smoke",
    address: AddressOption = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="cpu, or on a GPU mps, peer_gpu, timeslice or inline; auto: what is there."
        ),
    ] = None,
    device: Annotated[int | None, typer.Option(help="Ordinal of the sessions' GPU.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key: load.seconds=5. Repeatable."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML page here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load a service: the one at --address, or one that is started for the test.

    On a GPU sessions have K caches of their own, which the service reads over CUDA IPC, and run
    decode steps as graphs.

    Ends with status 0 only if every answer that was compared is right and the workload's limits
    hold.
    """
    _need("hdrh", *(("jinja2", "matplotlib") if report else ()))
    if report is not None:
        _write(report, "", "a")  # rather now than after an hour
    from dsa_indexer_cli.load.console import ConsoleProgress, show
    from dsa_indexer_cli.load.run import run_sessions
    from dsa_indexer_cli.load.summary import summarise
    from dsa_indexer_cli.load.workload import WorkloadError, load_workload, parse_change
    from indexer_client import IndexerError

    running = address or os.environ.get("DSA_INDEXER_ADDRESS")
    if running:
        running = client_settings(running).address
    try:
        changes = dict(map(parse_change, change or []))
        flags = {"load.placement": placement, "load.device": device}
        changes |= {key: value for key, value in flags.items() if value is not None}
        wanted = load_workload(workload, changes)
        with _asked_to_end() as stop, ConsoleProgress() as progress:
            result = summarise(wanted, run_sessions(wanted, running or None, progress.tell, stop))
    except WorkloadError as error:
        fail(str(error), 2)
    except IndexerError as error:
        fail(f"{error} (fix: start it with `dsa-indexer serve`, or leave --address out)")
    except RuntimeError as error:
        fail(str(error))
    if report is not None:
        from dsa_indexer_cli.load.report import page

        _write(report, page(result))
    if as_json:
        print_json(result.as_json())
    else:
        show(result, report)
    if not result.ok:
        raise typer.Exit(1)


def _need(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            fail(f"load: {module} is missing (fix: pip install 'dsa-indexer[load,plots]')", 2)


@contextmanager
def _asked_to_end() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C (or SIGTERM, or the terminal's end), so that what was measured is
    shown all the same, and a service of the test's own does not stay behind.
    """
    stop = threading.Event()
    with when_asked_to_end(lambda *_: stop.set()):
        yield stop


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fail(f"report: {path}: {error.strerror} (fix: a file in a folder that can be written)", 2)


def register(app: typer.Typer) -> None:
    app.command()(load)
