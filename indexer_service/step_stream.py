"""One RunSteps stream: plans in, reports out, and a bound on what a slow reader may pile up."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import ServiceError, exhausted, invalid, of_handoff, shown
from indexer_service.guard import Context
from indexer_service.session_table import SessionTable
from indexer_service.sessions import Session
from indexer_service.settings import Settings
from ipc_handoff.errors import HandoffError


class StepStream:
    """One call of RunSteps.

    Reports and, behind them, the end of the stream (None, or the error that ends it) pass one
    queue, so that what was reported before the end is also sent before it. The end waits for
    room; a report, for which a session's steps would have to wait, does not.
    """

    def __init__(self, table: SessionTable, settings: Settings, context: Context) -> None:
        self._table = table
        self._context = context
        self._write_seconds = settings.report_write_seconds
        self._first_plan_seconds = settings.first_plan_seconds
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[pb.StepReport | ServiceError | None] = asyncio.Queue(
            settings.unread_reports
        )
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: Session | None = None
        self._unanswered = 0
        self._client_is_done = False
        self._is_over = False

    async def run(self, requests: AsyncIterator[pb.RunStepsRequest]) -> None:
        """Returns when the client has sent all its plans and was sent all reports.

        Raises:
            ServiceError: an unknown, stale or ended session; RESOURCE_EXHAUSTED for a client
                that does not read its reports, or sends no plan at all.
        """
        # By itself: broken off together with the first report, gRPC would send it once more with
        # the stream's end, fail in that, and leave the client waiting for good.
        await self._context.send_initial_metadata(())
        self._start(self._read(requests))
        writer = self._start(self._write())
        try:
            ends: set[asyncio.Future[Any]] = {writer, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                raise self._failure.result()
            writer.result()
        finally:
            self._is_over = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: "asyncio.Task[None]") -> None:
        """A task that died must not leave the stream waiting for it."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _read(self, requests: AsyncIterator[pb.RunStepsRequest]) -> None:
        try:
            await self._read_all(requests)
        except ServiceError as error:
            # An ended session's stream is closed by `_follow`, after its last reports.
            if self._session is None or not self._session.ended.done():
                await self._outgoing.put(error)
            return
        self._client_is_done = True
        self._end_if_all_is_answered()

    async def _read_all(self, requests: AsyncIterator[pb.RunStepsRequest]) -> None:
        seconds = self._first_plan_seconds
        try:
            async with asyncio.timeout(seconds) as first:
                async for request in requests:
                    first.reschedule(None)
                    refusal = self._take(request)
                    if refusal is not None:
                        # Waits for room: who sends nonsense and does not read is not read either.
                        await self._outgoing.put(refusal)
        except TimeoutError:
            raise exhausted(
                "stream", f"no plan came within {seconds} s", "open it with its first plan"
            ) from None

    def _take(self, request: pb.RunStepsRequest) -> pb.StepReport | None:
        """Submit a plan; the report of one that is refused at once."""
        if self._session is not None and request.session_id not in ("", self._session.id):
            raise invalid(
                "session_id",
                f"{shown(request.session_id)} in a stream of another session",
                "one stream a session",
            )
        if not request.HasField("plan"):
            raise invalid("plan", "is missing", "one plan a message")
        session_id = request.session_id if self._session is None else self._session.id
        session = self._table.get(session_id, request.plan.epoch, "plan.epoch")
        if self._session is None:
            self._session = session
            self._start(self._follow(session))
        try:
            session.submit(request.plan, self._report_from_thread)
            self._unanswered += 1
        except (ServiceError, HandoffError) as caught:
            error = caught if isinstance(caught, ServiceError) else of_handoff(caught)
            return _rejected(request.plan, error)
        return None

    async def _follow(self, session: Session) -> None:
        """End the stream with its session, once the steps have reported."""
        await asyncio.wait([session.ended])
        await session.released()
        await self._outgoing.put(session.ended.result()())

    def _report_from_thread(self, report: pb.StepReport) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the stream with it
            self._loop.call_soon_threadsafe(self._report, report)

    def _report(self, report: pb.StepReport) -> None:
        if self._is_over:
            return
        self._unanswered -= 1
        try:
            self._outgoing.put_nowait(report)
        except asyncio.QueueFull:
            self._fail(_unread())
        self._end_if_all_is_answered()

    def _end_if_all_is_answered(self) -> None:
        if self._client_is_done and not self._unanswered:
            self._start(self._outgoing.put(None))

    async def _write(self) -> None:
        while (item := await self._outgoing.get()) is not None:
            if isinstance(item, ServiceError):
                raise item
            try:
                async with asyncio.timeout(self._write_seconds):
                    await self._context.write(pb.RunStepsResponse(report=item))
            except TimeoutError:
                raise _unread() from None


def _rejected(plan: pb.StepPlan, error: ServiceError) -> pb.StepReport:
    return pb.StepReport(
        step=plan.step,
        epoch=plan.epoch,
        status=pb.STEP_STATUS_REJECTED,
        code=error.code.value[0],
        message=str(error),
    )


def _unread() -> ServiceError:
    return exhausted("stream", "its reports are not read", "read while sending")
