"""The command's entry point: one module a subcommand.

None of them loads torch before it runs: help and a wrong option are there at once.
"""

from typing import Annotated

import typer

from dsa_indexer_cli import (
    demo_command,
    doctor,
    load_command,
    racelab_command,
    serve,
    status,
    trace_command,
    version,
)

app = typer.Typer(
    name="dsa-indexer",
    help="DeepSeek Sparse Attention's indexer as a service beside the inference engine.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", is_eager=True)
    ] = False,
) -> None:
    if show_version:
        typer.echo(version.versions()["dsa-indexer"])
        raise typer.Exit


for module in (
    serve,
    demo_command,
    racelab_command,
    status,
    doctor,
    trace_command,
    load_command,
    version,
):
    module.register(app)
