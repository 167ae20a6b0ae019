"""Where the service may listen: a private Unix socket, loopback, or mutual TLS."""

import asyncio
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

from indexer_service.errors import StartError
from indexer_service.settings import Settings
from indexer_service.socket_directory import SocketDirectory
from indexer_service.threads import in_thread
from ipc_handoff.addresses import UNIX, socket_path
from ipc_handoff.descriptors import DescriptorServer

_TLS_SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca")
_FORMS = "unix:PATH, HOST:PORT or [IPV6]:PORT"


class Listener(Protocol):
    """One address of the service.

    Attributes:
        descriptors: the socket for descriptors; None where no host memory can be shared.
        descriptor_socket: its file name, beside the service's socket; "" without one.
    """

    descriptors: DescriptorServer | None
    descriptor_socket: str

    async def bind(self, server: grpc.aio.Server) -> None:
        """Add the address to a server that has not started.

        Raises:
            StartError: it cannot be had.
        """

    async def publish(self) -> str:
        """Make the address known, now that the server answers; the address."""

    def is_replaced(self) -> bool:
        """Whether another service has the address now, so that nobody will come here."""

    async def close(self) -> None:
        """After the server has stopped: leave nothing behind."""


def create_listener(settings: Settings) -> Listener:
    """The listener of `settings.address`.

    Raises:
        StartError: an address that is none, or that would need TLS.
    """
    path = socket_path(settings.address)
    if path is None:
        return TcpListener(settings)
    if not path.name:
        raise StartError(f"address: {settings.address!r} has no path (fix: {_FORMS})")
    for name in _TLS_SETTINGS:
        if getattr(settings, name) is not None:
            raise StartError(
                f"{name}: a Unix socket has no TLS (fix: leave it out, or listen on HOST:PORT)"
            )
    return UnixListener(path)


class UnixListener:
    """A Unix socket in a private directory, and the descriptor socket beside it."""

    def __init__(self, path: Path) -> None:
        self._files = SocketDirectory(path)
        self.descriptors: DescriptorServer | None = None
        self.descriptor_socket = ""

    async def bind(self, server: grpc.aio.Server) -> None:
        claim = asyncio.ensure_future(in_thread(self._files.claim))
        try:
            await asyncio.shield(claim)
        except asyncio.CancelledError:
            # What was begun must be known before it can be undone.
            await asyncio.wait([claim])
            raise
        self.descriptor_socket = self._files.descriptor_path.name
        try:
            self.descriptors = DescriptorServer(str(self._files.descriptor_path))
            _add_port(server, f"{UNIX}{self._files.server_path}", None)
        except OSError as error:
            raise StartError(
                f"address: {self._files.descriptor_path}: {error.strerror} (fix: another directory)"
            ) from None

    async def publish(self) -> str:
        self._files.publish()
        return f"{UNIX}{self._files.public}"

    def is_replaced(self) -> bool:
        return self._files.is_replaced()

    async def close(self) -> None:
        if self.descriptors is not None:
            await in_thread(self.descriptors.close)
        await in_thread(self._files.withdraw)


@dataclass(frozen=True)
class _TcpAddress:
    host: str
    port: int

    @property
    def target(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TcpListener:
    """A TCP port: plain on loopback, mutual TLS anywhere. No host memory is shared here."""

    def __init__(self, settings: Settings) -> None:
        self.descriptors: DescriptorServer | None = None
        self.descriptor_socket = ""
        self._address, is_loopback = _resolved(settings.address)
        self._credentials = _credentials(settings)
        if self._credentials is None and not is_loopback:
            raise StartError(
                f"address: {settings.address} is reachable from other machines (fix: set "
                f"{', '.join(_TLS_SETTINGS)}, or listen on loopback)"
            )

    async def bind(self, server: grpc.aio.Server) -> None:
        port = _add_port(server, self._address.target, self._credentials)
        self._address = _TcpAddress(self._address.host, port)

    async def publish(self) -> str:
        return self._address.target

    def is_replaced(self) -> bool:
        return False

    async def close(self) -> None:
        """TCP leaves nothing behind."""


def _add_port(
    server: grpc.aio.Server, target: str, credentials: grpc.ServerCredentials | None
) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(target)
        else:
            port = server.add_secure_port(target, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise StartError(f"address: cannot listen on {target} (fix: is it in use?)")
    return port


def _resolved(address: str) -> tuple[_TcpAddress, bool]:
    """The first numeric address, and whether every one that the name stands for is loopback."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise StartError(f"address: {address!r} is not an address (fix: {_FORMS})")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartError(f"address: {host!r} has no address: {error} (fix: {_FORMS})") from None
    numeric = sorted({str(entry[4][0]) for entry in found}, key=lambda text: ":" in text)
    return _TcpAddress(numeric[0], int(port)), all(_is_loopback(text) for text in numeric)


def _is_loopback(numeric: str) -> bool:
    return ipaddress.ip_address(numeric.partition("%")[0]).is_loopback


def _credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Mutual TLS from all three files; None if none is set."""
    paths: dict[str, Path | None] = {name: getattr(settings, name) for name in _TLS_SETTINGS}
    missing = [name for name, path in paths.items() if path is None]
    if len(missing) == len(paths):
        return None
    if missing:
        raise StartError(f"{missing[0]}: not set (fix: set all of {', '.join(_TLS_SETTINGS)})")
    contents = {name: _read(name, path) for name, path in paths.items() if path is not None}
    _check_pems(settings)
    return grpc.ssl_server_credentials(
        [(contents["tls_key"], contents["tls_certificate"])],
        root_certificates=contents["tls_client_ca"],
        require_client_auth=True,
    )


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"{name}: {path}: {error.strerror} (fix: a readable PEM file)") from None


def _check_pems(settings: Settings) -> None:
    """gRPC takes any bytes and then refuses every client: look at them first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(str(settings.tls_certificate), str(settings.tls_key), password=b"")
    except (ssl.SSLError, OSError) as error:
        raise StartError(
            f"tls_certificate: it and tls_key are not a pair: {error} (fix: PEM files that match)"
        ) from None
    try:
        context.load_verify_locations(str(settings.tls_client_ca))
    except (ssl.SSLError, OSError) as error:
        raise StartError(f"tls_client_ca: {error} (fix: a PEM file of certificates)") from None
