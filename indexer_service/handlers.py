"""The calls of the control contract. Thin: what they mean stands elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_service.errors import ReportedError
from indexer_service.guard import Context
from indexer_service.session_table import SessionTable
from indexer_service.sessions import Session
from indexer_service.settings import Settings
from indexer_service.status import StatusReporter
from indexer_service.step_stream import StepStream
from indexer_service.validation import checked_names, checked_single_layer
from ipc_handoff.wire import layout_message


class Handlers(rpc.IndexerServiceServicer):
    """Runs behind `guard.Guard`, which words the errors.

    Args:
        descriptor_socket: file name of the descriptor socket; empty over TCP.
    """

    def __init__(
        self,
        table: SessionTable,
        reporter: StatusReporter,
        settings: Settings,
        descriptor_socket: str,
    ) -> None:
        self._table = table
        self._reporter = reporter
        self._settings = settings
        self._descriptor_socket = descriptor_socket

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        session = await self._table.open(request)
        agreement = session.agreement
        return pb.OpenSessionResponse(
            session_id=session.id,
            epoch=session.epoch,
            lease_seconds=session.lease_seconds,
            configuration=agreement.configuration,
            placement=agreement.placement,
            signalling=agreement.signalling,
            reasons=agreement.reasons,
            descriptor_nonce=session.nonce,
            descriptor_socket=self._descriptor_socket,
            service_version=self._reporter.version,
            layout=layout_message(agreement.geometry),
        )

    async def RegisterRegions(
        self, request: pb.RegisterRegionsRequest, context: Context
    ) -> pb.RegisterRegionsResponse:
        session = self._table.get(request.session_id, request.epoch)
        await session.register(request.regions)
        return pb.RegisterRegionsResponse(mapped_bytes=session.regions.mapped_bytes)

    async def UnregisterRegions(
        self, request: pb.UnregisterRegionsRequest, context: Context
    ) -> pb.UnregisterRegionsResponse:
        session = self._table.get(request.session_id, request.epoch)
        layers, bank = session.agreement.geometry.layers, session.regions.bank_names
        checked_names(request.names, layers, bank)
        await session.unregister(request.names)
        return pb.UnregisterRegionsResponse(mapped_bytes=session.regions.mapped_bytes)

    # The stubs know only generators; writing by hand is what shows that nobody reads.
    async def RunSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RunStepsRequest], context: Context
    ) -> None:
        await StepStream(self._table, self._settings, context).run(request_iterator)

    async def SelectTopK(
        self, request: pb.SelectTopKRequest, context: Context
    ) -> pb.SelectTopKResponse:
        session = self._table.get(request.session_id, request.plan.epoch, "plan.epoch")
        checked_single_layer(request.plan)
        report = await _reported(session, request.plan)
        if report.status in (pb.STEP_STATUS_REJECTED, pb.STEP_STATUS_FAILED):
            raise ReportedError(report.code, report.message)
        return pb.SelectTopKResponse(report=report)

    async def KeepAlive(
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        session = self._table.get(request.session_id, request.epoch)
        return pb.KeepAliveResponse(lease_seconds=session.lease_seconds)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        session = self._table.get(request.session_id, request.epoch)
        return pb.CloseSessionResponse(cancelled_steps=await self._table.close(session))

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        return self._reporter.status()


async def _reported(session: Session, plan: pb.StepPlan) -> pb.StepReport:
    """Submit a plan and wait for its report; the runner owes one for every plan it took."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[pb.StepReport] = loop.create_future()

    def settle(report: pb.StepReport) -> None:
        if not future.done():
            future.set_result(report)

    def on_report(report: pb.StepReport) -> None:
        with suppress(RuntimeError):  # the loop has ended; nobody waits
            loop.call_soon_threadsafe(settle, report)

    session.submit(plan, on_report)
    return await future
