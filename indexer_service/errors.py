"""Errors of the control plane: a gRPC code and a message that names the field and the fix."""

import grpc

from ipc_handoff.errors import HandoffError, LayoutMismatch, RegionError, RegionUnavailable

# A message travels in a header whose default limit is 8 KiB; percent-encoding may triple it.
_MESSAGE_BYTES = 1500
_SHOWN_CHARACTERS = 80
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StartError(Exception):
    """The service cannot start; the message is one line, `field: problem (fix: fix)`."""


class ServiceError(Exception):
    """A refusal. Its text reads `field: problem (fix: fix)`.

    Attributes:
        code: the gRPC status code.
    """

    def __init__(self, code: grpc.StatusCode, field: str, problem: str, fix: str) -> None:
        super().__init__(clipped(f"{field}: {problem} (fix: {fix})"))
        self.code = code


class ReportedError(ServiceError):
    """The refusal or failure that a step report already words.

    Args:
        code: number of the gRPC status code; an unknown one becomes INTERNAL.
    """

    def __init__(self, code: int, text: str) -> None:
        Exception.__init__(self, clipped(text))
        self.code = _CODES.get(code, grpc.StatusCode.INTERNAL)


def invalid(field: str, problem: str, fix: str) -> ServiceError:
    """The request can never be right."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, field, problem, fix)


def precondition(field: str, problem: str, fix: str) -> ServiceError:
    """Right in form, wrong for the present state."""
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, field, problem, fix)


def exhausted(field: str, problem: str, fix: str) -> ServiceError:
    """Over an agreed limit."""
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, field, problem, fix)


def not_found(field: str, problem: str, fix: str) -> ServiceError:
    """Nothing has this name."""
    return ServiceError(grpc.StatusCode.NOT_FOUND, field, problem, fix)


def already_exists(field: str, problem: str, fix: str) -> ServiceError:
    """Something has this name already."""
    return ServiceError(grpc.StatusCode.ALREADY_EXISTS, field, problem, fix)


def unauthenticated(field: str, problem: str, fix: str) -> ServiceError:
    """The lease ran out."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, field, problem, fix)


def unavailable(field: str, problem: str, fix: str) -> ServiceError:
    """The service is starting or shutting down."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, field, problem, fix)


def internal() -> ServiceError:
    """A fault of the service's own; what it was stands in the log and not in the answer."""
    return ServiceError(
        grpc.StatusCode.INTERNAL, "service", "internal error", "report it with the service's log"
    )


def of_handoff(error: HandoffError) -> ServiceError:
    """The refusal that an error of the data contract amounts to; its text is kept."""
    if isinstance(error, LayoutMismatch | RegionUnavailable):
        return ReportedError(grpc.StatusCode.FAILED_PRECONDITION.value[0], str(error))
    if isinstance(error, RegionError):
        return ReportedError(grpc.StatusCode.INVALID_ARGUMENT.value[0], str(error))
    return internal()


def clipped(text: str) -> str:
    """`text` cut to what a status message can carry."""
    return text.encode()[:_MESSAGE_BYTES].decode(errors="ignore")


def shown(text: str) -> str:
    """Text of a request as a message shows it: quoted, and short."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")
