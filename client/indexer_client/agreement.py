"""What the service must answer to OpenSession: both sides check it, each with its own code."""

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.errors import AttachRefused

_ON_GPU = (pb.PLACEMENT_MPS, pb.PLACEMENT_PEER_GPU, pb.PLACEMENT_TIMESLICE)


def check_opened(request: pb.OpenSessionRequest, opened: pb.OpenSessionResponse) -> None:
    """Raise AttachRefused, naming the field, unless the service agreed to what was asked."""
    _check_placement(request, opened.placement)
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


def refusal_of_host_memory(placement: str) -> AttachRefused | None:
    """Why a worker whose memory is the host's looks for no service, by its `placement` setting."""
    if placement == "inline":
        return AttachRefused("placement: inline was asked for (fix: auto, to use a service)")
    if placement not in ("auto", "cpu"):
        return AttachRefused(
            f"placement: {placement}, but this session shares host memory (fix: auto or cpu, or a "
            "session whose memory is on the GPU)"
        )
    return None


def _check_placement(request: pb.OpenSessionRequest, found: pb.Placement) -> None:
    """It is what was asked for; else what the memory is good for."""
    if request.placement:
        good: tuple[pb.Placement, ...] = (request.placement,)
        fix = "a service that can have it, or another `placement` in the client's settings"
    elif request.worker.gpu_uuid:
        good = _ON_GPU
        fix = "a service on a GPU: this worker shares device memory"
    else:
        good = (pb.PLACEMENT_CPU,)
        fix = "a service on the CPU: this worker shares host memory"
    if found not in good:
        wanted = " or ".join(_name(pb.Placement, placement) for placement in good)
        raise AttachRefused(
            f"placement: the service has {_name(pb.Placement, found)}, this side {wanted} "
            f"(fix: {fix})"
        )


def _name(enum: "type[pb.Placement] | type[pb.Signalling]", value: int) -> str:
    return enum.Name(value) if value in enum.values() else str(value)
