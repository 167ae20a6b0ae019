"""`dsa-indexer version`: what is installed, for a bug report."""

import platform
from importlib.metadata import version as installed

import typer

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.output import JsonOption, console, print_json
from ipc_handoff.layout import LAYOUT_VERSION


def versions() -> dict[str, str]:
    """By name."""
    packages = ("dsa-indexer", "torch", "grpcio", "protobuf", "opentelemetry-sdk")
    return {
        **{package: installed(package) for package in packages},
        "contract": pb.DESCRIPTOR.package,
        "hand-over layout": str(LAYOUT_VERSION),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def version(as_json: JsonOption = False) -> None:
    """Show versions of this installation and of what it stands on."""
    if as_json:
        print_json(versions())
    else:
        for name, value in versions().items():
            console.print(f"{name:<18} {value}", highlight=False)


def register(app: typer.Typer) -> None:
    app.command()(version)
