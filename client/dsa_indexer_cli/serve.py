"""`dsa-indexer serve`: run the service until SIGTERM. One flag a setting."""

import inspect
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from dsa_indexer_cli.output import fail
from indexer_service.errors import StartError
from indexer_service.executor import DeviceLost
from indexer_service.settings import Settings, load
from ipc_handoff.telemetry.log_ids import TraceIds

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s%(trace)s"

_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(help="TOML file of settings"),
    ],
)

_KINDS = {int: "INTEGER", float: "NUMBER", ByteSize: "BYTES", Path: "PATH"}


def _flags() -> list[inspect.Parameter]:
    """The settings as options: text here, given its type by the settings object."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    help=field.description,
                    metavar=_kind(field.annotation),
                    show_default=_default(field),
                ),
            ],
        )
        for name, field in Settings.model_fields.items()
    ]


def _default(field: FieldInfo) -> str | bool:
    value = field.get_default(call_default_factory=True)
    return False if value is None else str(value)


def _kind(annotation: Any) -> str:
    """What a value looks like, for the help."""
    choices = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(choices)
    if annotation is bool:
        return "true|false"
    return next((kind for base, kind in _KINDS.items() if base in (annotation, *choices)), "TEXT")


DEVICE_LOST_STATUS = 70
"""Exit status that tells a supervisor to start the service again: its GPU context was lost."""


def serve(**flags: Any) -> None:
    """Run the indexer service on this node until SIGTERM or Ctrl-C.

    Every option is also a variable (--lease-seconds is DSA_INDEXER_LEASE_SECONDS) and a key of
    the TOML file (lease_seconds); a flag wins over a variable, a variable over the file.
    """
    config = flags.pop("config")
    try:
        settings = load(flags, config)
    except StartError as error:
        fail(str(error), 2)
    handler = logging.StreamHandler()
    handler.addFilter(TraceIds())
    logging.basicConfig(level=settings.log_level, format=LINE, handlers=[handler])
    from indexer_service import serving

    try:
        serving.run(settings)
    except StartError as error:
        fail(str(error), 2)
    except DeviceLost:
        # Logged already. At once: what would be undone at exit needs the context that is gone.
        logging.shutdown()
        os._exit(DEVICE_LOST_STATUS)


def register(app: typer.Typer) -> None:
    parameters = [_CONFIG, *_flags()]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command()(serve)
