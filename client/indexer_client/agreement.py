"""What the service must answer to OpenSession: both sides check it, each with its own code."""

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.errors import AttachRefused


def check_opened(request: pb.OpenSessionRequest, opened: pb.OpenSessionResponse) -> None:
    """Raise AttachRefused, naming the field, unless the service agreed to what was asked."""
    required = request.required_configuration_hash
    for field, found, wanted, fix in (
        (
            "layout.version",
            str(opened.layout.version),
            str(request.layout.version),
            "the same dsa-indexer version on both sides",
        ),
        (
            "layout.fingerprint",
            f"{opened.layout.fingerprint:#018x}",
            f"{request.layout.fingerprint:#018x}",
            "the same dsa-indexer version on both sides",
        ),
        (
            "layout.slots",
            str(opened.layout.slots),
            str(request.layout.slots),
            "the same dsa-indexer version on both sides",
        ),
        (
            "configuration.hash",
            opened.configuration.hash,
            required or opened.configuration.hash,
            "the engine and settings of the worker's fallback",
        ),
        (
            "placement",
            _name(pb.Placement, opened.placement),
            _name(pb.Placement, pb.PLACEMENT_CPU),
            "a service on the CPU: this worker shares host memory",
        ),
        (
            "signalling",
            _name(pb.Signalling, opened.signalling),
            _name(pb.Signalling, request.signalling),
            "another `signalling` in the client's settings",
        ),
    ):
        if found != wanted:
            raise AttachRefused(
                f"{field}: the service has {found}, this side {wanted} (fix: {fix})"
            )


def _name(enum: "type[pb.Placement] | type[pb.Signalling]", value: int) -> str:
    return enum.Name(value) if value in enum.values() else str(value)
