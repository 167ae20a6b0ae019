"""The service's gRPC errors as typed exceptions."""

import grpc


class IndexerError(Exception):
    """Base. `str` is the service's message: `field: what is wrong (fix: what to do)`."""


class InvalidRequest(IndexerError):
    """INVALID_ARGUMENT: can never be right."""


class WrongState(IndexerError):
    """FAILED_PRECONDITION: right in form, wrong for the present state (a stale epoch, say)."""


class LimitExceeded(IndexerError):
    """RESOURCE_EXHAUSTED: over an agreed limit."""


class NotFound(IndexerError):
    """NOT_FOUND: no such session or region."""


class AlreadyExists(IndexerError):
    """ALREADY_EXISTS: the name is taken."""


class LeaseExpired(IndexerError):
    """UNAUTHENTICATED: the session's lease ran out."""


class ServiceUnavailable(IndexerError):
    """Nobody answers, or not in time."""


class AttachRefused(IndexerError):
    """A session cannot be had for a reason outside the service (no bank, no descriptor socket)."""


_BY_CODE: dict[grpc.StatusCode, type[IndexerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: LeaseExpired,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceUnavailable,
    grpc.StatusCode.CANCELLED: ServiceUnavailable,
}

_BY_NUMBER = {code.value[0]: kind for code, kind in _BY_CODE.items()}

# These were refused: the service has done nothing of what was asked. Any other error may have
# come while it was doing it.
REFUSALS = (InvalidRequest, WrongState, LimitExceeded, NotFound, AlreadyExists, LeaseExpired)

# The session is gone or will never work again: attach anew.
SESSION_LOST = (WrongState, NotFound, LeaseExpired)


def from_status(code: int, message: str) -> IndexerError:
    """The typed form of a report's code, a google.rpc.Code."""
    return _BY_NUMBER.get(code, IndexerError)(message)


def from_rpc_error(error: grpc.RpcError) -> IndexerError:
    """The typed form of what a stub raised."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        # gRPC refuses before the service sees the message, in words of its own.
        details = f"message: {details} (fix: smaller, or raise the service's max_message_bytes)"
    return _BY_CODE.get(code, IndexerError)(details)
