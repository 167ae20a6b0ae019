"""The command's entry point: one module a subcommand."""

import typer

from dsa_indexer_cli import demo_command, doctor, serve, status, version

app = typer.Typer(
    name="dsa-indexer",
    help="DeepSeek Sparse Attention's indexer as a service beside the inference engine.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for module in (serve, demo_command, status, doctor, version):
    module.register(app)
