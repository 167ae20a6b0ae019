"""`dsa-indexer doctor`: what this host offers, what is missing, and what to change."""

import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import typer
from rich.table import Table

from dsa_indexer_cli.output import JsonOption, console, print_json
from dsa_indexer_cli.status import AddressOption, client_settings
from indexer_client.control_plane import ControlPlane
from indexer_client.errors import IndexerError
from ipc_handoff.addresses import socket_path
from ipc_handoff.descriptors import peer_of
from ipc_handoff.processes import ProcessWatch
from ipc_handoff.regions import HostMemory
from ipc_handoff.wakeups import Wakeup


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        ok: True, False, or None for something that is only said.
        detail: what was found.
        fix: what to change; empty when nothing is wrong.
    """

    check: str
    ok: bool | None
    detail: str
    fix: str = ""


def doctor(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Check this host and name the placement it can have. Status 1 if something must change."""
    findings = examine(client_settings(address).address)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("check", "", "found", "what to change")
        for finding in findings:
            mark = {True: "ok", False: "FAIL", None: "-"}[finding.ok]
            table.add_row(finding.check, mark, finding.detail, finding.fix)
        console.print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def examine(address: str) -> list[Finding]:
    """Every check of this host, for a service at `address`."""
    return [
        _attempt("shared memory", "Linux 3.17 or newer with memfd_create", _shared_memory),
        _attempt("wake-ups", "Linux with eventfd", _wakeups),
        _attempt("proof of death", "Linux 5.3 or newer with pidfd_open", _pidfd),
        _attempt("peer credentials", "Linux Unix sockets with SO_PEERCRED", _credentials),
        _socket_directory(address),
        _service(address),
        _gpu(),
    ]


def _attempt(check: str, needs: str, probe: Callable[[], str]) -> Finding:
    try:
        return Finding(check, True, probe())
    except (OSError, AttributeError) as error:
        return Finding(check, False, str(error), needs)


def _shared_memory() -> str:
    memory = HostMemory.create(4096, "doctor")
    seals = fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS)
    memory.close()
    return f"memfd with seals {seals:#x}"


def _wakeups() -> str:
    wakeup = Wakeup()
    wakeup.ring()
    wakeup.clear()
    wakeup.close()
    return "eventfd"


def _pidfd() -> str:
    watch = ProcessWatch(os.getpid())
    if watch.fileno() is None:
        raise OSError("this process cannot be watched by a pidfd (filtered?)")
    watch.close()
    return "pidfd"


def _credentials() -> str:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = peer_of(ours)
    if peer.pid != os.getpid():
        raise OSError(f"the kernel says pid {peer.pid}, expected {os.getpid()}")
    return f"pid and user {peer.uid}"


def _socket_directory(address: str) -> Finding:
    path = socket_path(address)
    if path is None:
        return Finding(
            "socket directory",
            None,
            f"{address} is TCP: no host memory is shared over it",
            "a unix: address, for the worker on this node",
        )
    directory = path.parent
    if not directory.exists():
        return Finding("socket directory", None, f"{directory}: made when the service starts")
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        return Finding(
            "socket directory",
            False,
            f"{directory} belongs to user {found.st_uid}, mode {found.st_mode & 0o777:o}",
            f"a directory of your own: chmod 700 {directory}, or another address",
        )
    return Finding("socket directory", True, f"{directory}, mode 700")


def _service(address: str) -> Finding:
    control_plane = ControlPlane(client_settings(address))
    try:
        reply = control_plane.get_status()
    except IndexerError:
        return Finding("service", None, f"none at {address}", "dsa-indexer serve")
    finally:
        control_plane.close()
    return Finding("service", True, f"version {reply.version}, {len(reply.sessions)} sessions")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("placement", True, "cpu: no GPU is visible here")
    name = torch.cuda.get_device_name(0)
    return Finding(
        "placement", True, f"cpu: {name} is visible, but this version places nothing on a GPU"
    )


def register(app: typer.Typer) -> None:
    app.command()(doctor)
