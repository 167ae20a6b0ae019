"""What `dsa-indexer doctor` looks at on every host: shared memory, processes, sockets."""

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from dsa_indexer_cli.doctor_finding import Finding
from ipc_handoff.addresses import socket_path
from ipc_handoff.descriptors import peer_of
from ipc_handoff.processes import ProcessWatch
from ipc_handoff.regions import HostMemory
from ipc_handoff.wakeups import Wakeup

_NAMESPACES = Path("/proc/self/ns")
_HOSTS_OWN = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
"""Inode numbers that the kernel gives the first namespaces."""

_SHARING = {
    "pid": "containers that share a service: --pid=host, or --pid=container:NAME of the other",
    "ipc": "containers that share a service: --ipc=host, or --ipc=container:NAME of the other",
}


def host_findings(address: str) -> list[Finding]:
    """What worker and service on this host need of it, for a service at `address`."""
    return [
        _attempt("shared memory", "Linux 3.17 or newer with memfd_create", _shared_memory),
        _attempt("wake-ups", "Linux with eventfd", _wakeups),
        _attempt("proof of death", "Linux 5.3 or newer with pidfd_open", _pidfd),
        _attempt("peer credentials", "Linux Unix sockets with SO_PEERCRED", _credentials),
        _socket_directory(address),
    ]


def namespace_findings() -> list[Finding]:
    """Whether another process of the host can be one that this one cannot see."""
    return [_namespace(kind) for kind in _HOSTS_OWN]


def _namespace(kind: str) -> Finding:
    check = f"{kind.upper()} namespace"
    try:
        number = (_NAMESPACES / kind).stat().st_ino
    except OSError as error:
        return Finding(check, None, str(error))
    if number == _HOSTS_OWN[kind]:
        return Finding(check, True, "the host's")
    return Finding(check, None, "a container's own", _SHARING[kind])


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
