"""`dsa-indexer status`: what a running service holds."""

from typing import TYPE_CHECKING, Annotated

import typer
from google.protobuf.json_format import MessageToDict
from pydantic import ValidationError
from rich.table import Table

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer_cli.output import JsonOption, console, fail, print_json
from indexer_service.settings import first_complaint
from ipc_handoff.addresses import check_address

if TYPE_CHECKING:
    from indexer_client import ClientSettings

AddressOption = Annotated[
    str | None, typer.Option(help="unix:PATH or HOST:PORT (DSA_INDEXER_ADDRESS).")
]


def client_settings(address: str | None) -> "ClientSettings":
    """The client's settings, with the address of a flag if one was given.

    Ends the command with a message if a variable holds what cannot be used.
    """
    from indexer_client import ClientSettings
    from indexer_client.control_plane import check_tls

    try:
        settings = ClientSettings() if address is None else ClientSettings(address=address)
        check_address(settings.address)
        check_tls(settings)
    except ValidationError as error:
        name, given, wish = first_complaint(error)
        fail(f"{name}: {given!r} cannot be used (fix: DSA_INDEXER_{name.upper()}: {wish})", 2)
    except ValueError as error:
        fail(str(error), 2)
    return settings


def status(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show a running service: sessions, memory, steps."""
    from indexer_client import IndexerError
    from indexer_client.control_plane import ControlPlane

    settings = client_settings(address)
    control_plane = ControlPlane(settings)
    try:
        reply = control_plane.get_status()
    except IndexerError as error:
        fail(f"{settings.address}: {error} (fix: start it with `dsa-indexer serve`)")
    finally:
        control_plane.close()
    if as_json:
        print_json(
            MessageToDict(
                reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
    else:
        _show(settings.address, reply)


def _show(address: str, reply: pb.GetStatusResponse) -> None:
    state = "serving" if reply.serving else "not serving"
    console.print(
        f"{address}: {state}, version {reply.version}, pid {reply.pid}, "
        f"up {reply.uptime_seconds:.0f} s, engine {reply.configuration.engine}, "
        f"{reply.mapped_bytes / 2**20:.1f} MiB mapped",
        highlight=False,
    )
    table = Table("worker", "epoch", "lease s", "MiB", "steps answered", "cancelled", "bad rows")
    for session in reply.sessions:
        worker = session.worker
        table.add_row(
            f"{worker.engine or 'worker'} {worker.pid} {worker.model}",
            str(session.epoch),
            f"{session.lease_remaining_seconds:.1f}",
            f"{session.mapped_bytes / 2**20:.1f}",
            str(session.answered_steps),
            str(session.cancelled_steps),
            str(session.faulted_rows),
        )
    if reply.sessions:
        console.print(table)


def register(app: typer.Typer) -> None:
    app.command()(status)
