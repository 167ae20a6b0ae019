"""`dsa-indexer serve`: run the service until SIGTERM. One flag a setting."""

import inspect
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from dsa_indexer_cli.output import fail
from indexer_service import server
from indexer_service.errors import StartError
from indexer_service.settings import Settings, load

_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(help="TOML file of settings (DSA_INDEXER_CONFIG)."),
    ],
)


def _flags() -> list[inspect.Parameter]:
    """The settings as options: text here, given its type by the settings object."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Option(help=f"{field.description} (DSA_INDEXER_{name.upper()}).")
            ],
        )
        for name, field in Settings.model_fields.items()
    ]


def serve(**flags: Any) -> None:
    """Run the indexer service on this node until SIGTERM or Ctrl-C."""
    config = flags.pop("config")
    try:
        settings = load(flags, config)
    except StartError as error:
        fail(str(error), 2)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        server.run(settings)
    except StartError as error:
        fail(str(error), 2)


def register(app: typer.Typer) -> None:
    parameters = [_CONFIG, *_flags()]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command()(serve)
