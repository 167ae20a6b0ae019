"""Services of other versions: what a later release may do, done to this one in its process."""

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from indexer_service import status, validation
from indexer_service.handlers import Handlers
from ipc_handoff import control, layout, wire

NEWER_VERSION = "99.0.0"
# Field 1000 of type string, which no message has.
UNKNOWN_FIELD = b"\xc2\x3e\x05later"

_UNARY = ("OpenSession", "RegisterRegions", "KeepAlive", "CloseSession", "GetStatus")

Call = Callable[..., Awaitable[Message]]


def compatible() -> None:
    """A later version of the same contract and layout: every answer has a field more."""
    status.service_version = lambda: NEWER_VERSION  # type: ignore[assignment]
    for name in _UNARY:
        setattr(Handlers, name, _with_a_field_more(getattr(Handlers, name)))


def _with_a_field_more(call: Call) -> Call:
    async def answer(self: Handlers, request: Message, context: Any) -> Message:
        reply = await call(self, request, context)
        reply.MergeFromString(UNKNOWN_FIELD)
        return reply

    return answer


def other_layout() -> None:
    """A later version whose shared bytes lie elsewhere."""
    status.service_version = lambda: NEWER_VERSION  # type: ignore[assignment]
    newer = layout.LAYOUT_VERSION + 1
    for module in (layout, control, wire, validation):
        module.LAYOUT_VERSION = newer  # type: ignore[attr-defined]
