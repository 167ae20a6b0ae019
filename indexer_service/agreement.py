"""What a session agrees on: placement, signalling and engine, each with its reason."""

from dataclasses import dataclass

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.devices import ServiceDevice
from indexer_service.errors import invalid, precondition, shown
from indexer_service.kernels.configuration import Configuration
from indexer_service.placements import agree_placement
from indexer_service.validation import checked_geometry, checked_worker
from ipc_handoff.layout import HandoffGeometry

_AUTOMATIC = ("", "auto")
_MAX_HASH = 128


@dataclass(frozen=True)
class Agreement:
    """The terms of one session; fixed for its life.

    Attributes:
        device: that the service computes on.
        reasons: one sentence each.
    """

    worker: pb.Worker
    geometry: HandoffGeometry
    device: ServiceDevice
    placement: pb.Placement
    signalling: pb.Signalling
    configuration: pb.EngineConfiguration
    reasons: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, str]:
        """What a later session must share to replace this one."""
        return self.worker.instance, self.worker.model


def configuration_message(configuration: Configuration) -> pb.EngineConfiguration:
    """A kernel configuration as the control contract carries it."""
    return pb.EngineConfiguration(
        engine=configuration.engine,
        settings=dict(configuration.settings),
        hash=configuration.hash,
    )


def agree(
    request: pb.OpenSessionRequest,
    configuration: Configuration,
    *,
    device: ServiceDevice,
    has_host_memory: bool,
    max_bank_bytes: int,
) -> Agreement:
    """Decide the terms of a session.

    Args:
        configuration: of the service's engine.
        device: that the service computes on.
        has_host_memory: whether descriptors can reach the service.
        max_bank_bytes: most bytes of control, staging and answers.

    Raises:
        ServiceError: INVALID_ARGUMENT, FAILED_PRECONDITION or RESOURCE_EXHAUSTED.
    """
    worker = checked_worker(request.worker)
    on_gpu = device.ordinal is not None
    geometry = checked_geometry(request, max_bank_bytes, on_gpu=on_gpu)
    placement, why_placement = agree_placement(request, device)
    signalling, why_signalling = _signalling(request.signalling, has_host_memory)
    why_engine = _engine(request, configuration)
    return Agreement(
        worker=worker,
        geometry=geometry,
        device=device,
        placement=placement,
        signalling=signalling,
        configuration=configuration_message(configuration),
        reasons=(why_placement, why_signalling, why_engine),
    )


def _signalling(wanted: pb.Signalling, has_host_memory: bool) -> tuple[pb.Signalling, str]:
    if wanted not in pb.Signalling.values():
        raise invalid("signalling", f"{wanted} is unknown", "a Signalling of this contract")
    if not has_host_memory:
        if wanted == pb.SIGNALLING_RING:
            raise precondition(
                "signalling",
                "SIGNALLING_RING needs shared host memory, and there is none over TCP",
                "SIGNALLING_STREAM, or the service's Unix socket",
            )
        return pb.SIGNALLING_STREAM, "signalling stream: no host memory is shared over TCP"
    if wanted == pb.SIGNALLING_STREAM:
        return pb.SIGNALLING_STREAM, "signalling stream: asked for"
    return pb.SIGNALLING_RING, "signalling ring: host memory is shared, a step needs no call"


def _engine(request: pb.OpenSessionRequest, configuration: Configuration) -> str:
    if request.engine not in (*_AUTOMATIC, configuration.engine):
        raise precondition(
            "engine",
            f"{shown(request.engine)}, this service runs {configuration.engine!r}",
            "leave it empty, or start a service with that engine",
        )
    required = request.required_configuration_hash
    if required and required != configuration.hash:
        raise precondition(
            "required_configuration_hash",
            f"{shown(required[:_MAX_HASH])}, this service has {configuration.hash!r} "
            f"({configuration.engine})",
            "the same engine and dsa-indexer version on both sides",
        )
    asked = "asked for" if request.engine == configuration.engine else "the service's own"
    return f"engine {configuration.engine}: {asked}"
