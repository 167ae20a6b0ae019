"""`dsa-indexer doctor`: what this host offers, what is missing, and what to change."""

from dataclasses import asdict

import typer
from rich.table import Table
from rich.text import Text

from dsa_indexer_cli.doctor_finding import Finding
from dsa_indexer_cli.output import JsonOption, console, print_json
from dsa_indexer_cli.status import AddressOption, client_settings

_MARKS = {True: "ok", False: "FAIL", None: "-"}


def doctor(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Check this host and name the placement it can have. Status 1 if something must change."""
    findings = examine(client_settings(address).address)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("check", "", "found", "what to change")
        for finding in findings:
            cells = (finding.check, _MARKS[finding.ok], finding.detail, finding.fix)
            table.add_row(*map(Text, cells))  # As text: a fix may have brackets.
        console.print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def examine(address: str) -> list[Finding]:
    """Every check of this host, for a service at `address`."""
    from dsa_indexer_cli.doctor_host import host_findings
    from dsa_indexer_cli.doctor_placement import placement_findings

    return [*host_findings(address), _service(address), *placement_findings()]


def _service(address: str) -> Finding:
    from indexer_client import IndexerError
    from indexer_client.control_plane import ControlPlane

    control_plane = ControlPlane(client_settings(address))
    try:
        reply = control_plane.get_status()
    except IndexerError:
        return Finding("service", None, f"none at {address}", "dsa-indexer serve")
    finally:
        control_plane.close()
    return Finding("service", True, f"version {reply.version}, {len(reply.sessions)} sessions")


def register(app: typer.Typer) -> None:
    app.command()(doctor)
