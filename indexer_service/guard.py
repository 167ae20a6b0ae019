"""Between gRPC and the handlers: parses requests, and turns errors into status codes.

No request ends the service: whatever a handler raises becomes a status, and one that nobody
foresaw becomes INTERNAL, with its traceback in the log.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from indexer_service.errors import ServiceError, internal, invalid, of_handoff
from ipc_handoff.errors import HandoffError

logger = logging.getLogger(__name__)

Parse = Callable[[bytes], Message]
# Generic for the type checker only, as is whatever else is quoted here.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
UnaryBehavior: TypeAlias = "Callable[[Message, Context], Awaitable[Message]]"
StreamBehavior: TypeAlias = "Callable[[AsyncIterator[Message], Context], Awaitable[None]]"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before every handler of one gRPC service.

    Args:
        service: its full name.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"
        self._running: set[asyncio.Task[Message]] = set()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any]]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """gRPC calls this for every call; parsing is taken over by the wrapped behavior."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        parse: Parse = handler.request_deserializer  # type: ignore[assignment]
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(handler.unary_unary, parse),  # type: ignore[arg-type]
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_stream_rpc_method_handler(
            self._stream(handler.stream_stream, parse),  # type: ignore[arg-type]
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, behavior: UnaryBehavior, parse: Parse
    ) -> Callable[[bytes, Context], Awaitable[Message]]:
        async def guarded(data: bytes, context: Context) -> Message:
            try:
                return await self._uninterrupted(behavior(_parsed(data, parse), context))
            except Exception as error:
                await _abort(context, error)

        return guarded

    def _stream(
        self, behavior: StreamBehavior, parse: Parse
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        async def guarded(data: AsyncIterator[bytes], context: Context) -> None:
            async def requests() -> AsyncIterator[Message]:
                async for item in data:
                    yield _parsed(item, parse)

            try:
                await behavior(requests(), context)
            except Exception as error:
                await _abort(context, error)

        return guarded

    async def _uninterrupted(self, work: Awaitable[Message]) -> Message:
        """A client that goes away must not stop a change of state halfway."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: "asyncio.Task[Message]") -> None:
        self._running.discard(task)
        # Looked at, since nobody else may be left who does.
        if not task.cancelled():
            task.exception()


def _parsed(data: bytes, parse: Parse) -> Message:
    try:
        return parse(data)
    except DecodeError:
        raise invalid(
            "message", "cannot be parsed", "send the message of this call's contract"
        ) from None


async def _abort(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, HandoffError):
        error = of_handoff(error)
    if isinstance(error, ServiceError):
        await context.abort(error.code, str(error))
    if isinstance(error, grpc.aio.AbortError):
        raise error
    logger.error("a handler failed", exc_info=error)
    fault = internal()
    await context.abort(fault.code, str(fault))
