"""Calls of the control plane, with deadlines and typed errors."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1.indexer_pb2_grpc import IndexerServiceStub
from indexer_client.errors import ServiceUnavailable, from_rpc_error
from indexer_client.settings import ClientSettings
from ipc_handoff.addresses import UNIX
from ipc_handoff.telemetry.tracing import Tracing

_Reply = TypeVar("_Reply")
_QUICK_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_SERVICE = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name

_OPTIONS = [
    # The service may be restarted at any moment; look for it soon after.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Channels to one address would otherwise share a connection and its fate.
    ("grpc.use_local_subchannel_pool", 1),
    # On a Unix socket the authority would be the path, which is not a legal one.
    ("grpc.default_authority", "localhost"),
]


class ControlPlane:
    """A channel to one service. Methods raise `indexer_client.errors`."""

    def __init__(self, settings: ClientSettings, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self.address = settings.address
        self._timeout = settings.rpc_timeout_seconds
        # Calls that move no memory: a frozen service must not hold up the way to its successor.
        self._quick = min(self._timeout, _QUICK_SECONDS)
        self._registering = settings.register_timeout_seconds
        self._channel = _channel(settings)
        self._stub = IndexerServiceStub(self._channel)

    def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        return self._traced("OpenSession", self._stub.OpenSession, request, self._quick)

    def register_regions(
        self, request: pb.RegisterRegionsRequest, look: Callable[[], None] = lambda: None
    ) -> pb.RegisterRegionsResponse:
        """It may take minutes, with a deadline of its own.

        Args:
            look: called a few times a second meanwhile; what it raises ends the call.
        """
        method: Callable[..., pb.RegisterRegionsResponse] = partial(
            _watched, self._stub.RegisterRegions, look
        )
        return self._traced("RegisterRegions", method, request, self._registering)

    def unregister_regions(
        self, request: pb.UnregisterRegionsRequest
    ) -> pb.UnregisterRegionsResponse:
        return self._traced("UnregisterRegions", self._stub.UnregisterRegions, request)

    def select_top_k(self, request: pb.SelectTopKRequest) -> pb.SelectTopKResponse:
        return self._traced("SelectTopK", self._stub.SelectTopK, request)

    def keep_alive(self, request: pb.KeepAliveRequest) -> pb.KeepAliveResponse:
        return self._call(self._stub.KeepAlive, request, self._quick)

    def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        return self._traced("CloseSession", self._stub.CloseSession, request)

    def get_status(self) -> pb.GetStatusResponse:
        return self._call(self._stub.GetStatus, pb.GetStatusRequest(), self._quick)

    def run_steps(self, requests: Iterator[pb.RunStepsRequest]) -> Any:
        """The stream; iterate over the call for responses, `cancel()` it to end."""
        return self._stub.RunSteps(requests)

    def close(self) -> None:
        self._channel.close()

    def _traced(
        self,
        name: str,
        method: Callable[..., _Reply],
        request: Any,
        timeout: float | None = None,
    ) -> _Reply:
        if self._tracing is None:
            return self._call(method, request, timeout)
        with self._tracing.client_call(f"{_SERVICE}/{name}") as metadata:
            return self._call(method, request, timeout, metadata)

    def _call(
        self,
        method: Callable[..., _Reply],
        request: Any,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> _Reply:
        try:
            return method(request, timeout=timeout or self._timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except ValueError as error:  # the channel was closed under the call
            raise ServiceUnavailable(f"{self.address}: {error}") from error


def _watched(
    method: Any,
    look: Callable[[], None],
    request: Any,
    timeout: float,
    metadata: Sequence[tuple[str, str]],
) -> Any:
    call = method.future(request, timeout=timeout, metadata=metadata)
    try:
        while True:
            try:
                return call.result(_LOOK_SECONDS)
            except grpc.FutureTimeoutError:
                look()
    finally:
        call.cancel()  # of no effect once it has ended


def check_tls(settings: ClientSettings) -> None:
    """Raise ValueError for a part of mutual TLS without the rest."""
    tls = _tls(settings)
    if any(tls) and not all(tls):
        raise ValueError(
            "client_tls_certificate: mutual TLS needs all of client_tls_certificate, "
            "client_tls_key and client_tls_server_ca (fix: set all three, or none)"
        )


def _tls(settings: ClientSettings) -> tuple[Path | None, Path | None, Path | None]:
    return (
        settings.client_tls_server_ca,
        settings.client_tls_key,
        settings.client_tls_certificate,
    )


def _channel(settings: ClientSettings) -> grpc.Channel:
    tls = _tls(settings)
    if settings.address.startswith(UNIX) or not any(tls):
        return grpc.insecure_channel(settings.address, options=_OPTIONS)
    check_tls(settings)
    ca, key, certificate = (path.read_bytes() for path in tls if path is not None)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    # The authority must be the name in the server's certificate: the address.
    options = [(name, value) for name, value in _OPTIONS if name != "grpc.default_authority"]
    return grpc.secure_channel(settings.address, credentials, options=options)
