"""How subcommands talk: to people on the console, to machines in JSON on standard output."""

import json
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def print_json(value: Any) -> None:
    """JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, sort_keys=True))


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with a message that says what to do."""
    # One line, also where standard error is a file: the terminal may break it, nobody else.
    errors.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
