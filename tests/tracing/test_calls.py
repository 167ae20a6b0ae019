"""Calls of the control plane: one trace over both sides, and spans that end as the call did."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client import ClientSettings, IndexerError
from indexer_client.control_plane import ControlPlane
from indexer_service.session_table import SessionTable
from indexer_service.settings import Settings
from indexer_service.telemetry import CallTelemetry
from ipc_handoff.telemetry.settings import TraceSettings
from ipc_handoff.telemetry.tracing import Tracing
from tests.service.support import open_request, running
from tests.support.waiting import SOON, eventually


class Both:
    """A client and a service in this process, with the spans of each."""

    def __init__(self, address: str, tracing: Tracing, exporters: list[Any]) -> None:
        settings = ClientSettings(address=address, rpc_timeout_seconds=SOON)
        self.client = ControlPlane(settings, tracing)
        self._exporters = exporters

    def spans(self) -> tuple[ReadableSpan, ReadableSpan]:
        """Of the one call, on the client's and on the service's side, once both have ended."""
        assert eventually(lambda: all(e.get_finished_spans() for e in self._exporters))
        (client,), (server,) = (exporter.get_finished_spans() for exporter in self._exporters)
        assert (client.kind, server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert client.context.trace_id == server.context.trace_id
        assert server.parent is not None
        assert server.parent.span_id == client.context.span_id
        assert client.end_time and server.end_time
        return client, server


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    exporters = [InMemorySpanExporter(), InMemorySpanExporter()]
    client, service = (
        Tracing(TraceSettings(side, export_seconds=0.05), [exporter])
        for side, exporter in zip(("client", "service"), exporters, strict=True)
    )
    settings = Settings(address=f"unix:{tmp_path}/d/i.sock")
    with running(settings, interceptors=[CallTelemetry(service)]) as local:
        made = Both(local.address, client, exporters)
        yield made
        made.client.close()
    client.close()
    service.close()


def test_a_call_is_one_trace_over_both_sides(both: Both) -> None:
    both.client.open_session(open_request())
    for span in both.spans():
        assert span.name == "dsa_indexer.v1.IndexerService/OpenSession"
        assert span.status.status_code is StatusCode.UNSET


def test_a_refused_call_is_an_error_on_both_sides(both: Both) -> None:
    with pytest.raises(IndexerError):
        both.client.close_session(pb.CloseSessionRequest(session_id="nobody"))
    for span in both.spans():
        assert span.status.status_code is StatusCode.ERROR


def test_a_call_that_its_client_gave_up_is_an_error_on_both_sides(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: object) -> None:
        await asyncio.sleep(2 * SOON)

    monkeypatch.setattr(SessionTable, "open", slow)
    both.client._quick = 0.5
    with pytest.raises(IndexerError):
        both.client.open_session(pb.OpenSessionRequest())
    client, server = both.spans()
    assert client.status.status_code is StatusCode.ERROR
    assert server.status.status_code is StatusCode.ERROR
    assert server.status.description == "cancelled"
    assert server.end_time and client.end_time
    assert server.end_time - client.end_time < SOON * 1e9
