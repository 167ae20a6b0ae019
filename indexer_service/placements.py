"""Where a session's selections are computed relative to its worker, with the reason."""

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.devices import ServiceDevice
from indexer_service.errors import ServiceError, invalid, precondition, shown
from ipc_handoff import cuda_runtime as cuda

# Names of the contract, for messages.
_MPS = pb.Placement.Name(pb.PLACEMENT_MPS)
_TIMESLICE = pb.Placement.Name(pb.PLACEMENT_TIMESLICE)
_PEER_GPU = pb.Placement.Name(pb.PLACEMENT_PEER_GPU)

_START_MPS = "start nvidia-cuda-mps-control before worker and service"


def agree_placement(
    request: pb.OpenSessionRequest, device: ServiceDevice
) -> tuple[pb.Placement, str]:
    """The placement and why; what the worker asks for is honoured or refused.

    Raises:
        ServiceError: INVALID_ARGUMENT for what is no placement, FAILED_PRECONDITION for one that
            worker and service cannot have.
    """
    if request.placement not in pb.Placement.values():
        raise invalid(
            "placement", f"{request.placement} is unknown", "a Placement of this contract"
        )
    if device.ordinal is None:
        return _on_cpu(request)
    if not request.worker.gpu_uuid:
        raise precondition(
            "worker.gpu_uuid",
            f"is empty, and this service runs on {device.gpu_uuid}",
            "the UUID of the worker's GPU, or a service on the CPU",
        )
    if request.placement == pb.PLACEMENT_CPU:
        raise precondition(
            "placement",
            f"PLACEMENT_CPU, and this service runs on {device.gpu_uuid}",
            f"{_MPS} or {_PEER_GPU}, or a service on the CPU",
        )
    if request.worker.gpu_uuid == device.gpu_uuid:
        return _on_one_gpu(request.placement, device.ordinal)
    return _on_two_gpus(request, device)


def _on_cpu(request: pb.OpenSessionRequest) -> tuple[pb.Placement, str]:
    if request.placement not in (pb.PLACEMENT_UNSPECIFIED, pb.PLACEMENT_CPU):
        raise precondition(
            "placement",
            f"{pb.Placement.Name(request.placement)} needs a GPU, and this service runs on the CPU",
            "PLACEMENT_CPU, or a service on the GPU",
        )
    if request.worker.gpu_uuid:
        raise precondition(
            "worker.gpu_uuid",
            f"{shown(request.worker.gpu_uuid)}, and this service runs on the CPU",
            "leave it empty for a worker on the CPU, or use a service on that GPU",
        )
    return pb.PLACEMENT_CPU, "placement cpu: this service runs on the CPU"


def _on_one_gpu(wanted: pb.Placement, ordinal: int) -> tuple[pb.Placement, str]:
    if wanted == pb.PLACEMENT_PEER_GPU:
        raise precondition(
            "placement",
            f"{_PEER_GPU}, and worker and service are on one GPU",
            f"{_MPS}, or a service on another GPU",
        )
    if wanted == pb.PLACEMENT_TIMESLICE:
        return wanted, "placement timeslice: asked for; streams sleep, and nothing polls"
    if cuda.runs_under_mps(ordinal):
        return pb.PLACEMENT_MPS, "placement mps: the worker's GPU, and MPS is running there"
    # Without MPS two processes take turns on a GPU: a gate that polls would burn this one's turn
    # while the worker that it waits for has none.
    asked = _MPS if wanted == pb.PLACEMENT_MPS else "worker and service are on one GPU"
    raise precondition(
        "placement",
        f"{asked}, and this service does not run under MPS",
        f"{_START_MPS}, {_TIMESLICE}, or a service on another GPU",
    )


def _on_two_gpus(request: pb.OpenSessionRequest, device: ServiceDevice) -> tuple[pb.Placement, str]:
    theirs, ours = request.worker.gpu_uuid, device.gpu_uuid
    if request.placement not in (pb.PLACEMENT_UNSPECIFIED, pb.PLACEMENT_PEER_GPU):
        raise precondition(
            "placement",
            f"{pb.Placement.Name(request.placement)}, but the worker is on {shown(theirs)} and "
            f"this service on {ours}",
            f"{_PEER_GPU}, or the service of the worker's GPU",
        )
    _check_peers(theirs, device)
    why = "asked for" if request.placement else "the worker is on another GPU, which is a peer"
    return pb.PLACEMENT_PEER_GPU, f"placement peer_gpu: {why}"


def _check_peers(theirs: str, device: ServiceDevice) -> None:
    """Raise FAILED_PRECONDITION unless kernels of both GPUs reach each other's memory."""
    peer = cuda.device_of_uuid(theirs)
    if peer is None:
        raise _apart(theirs, "is not visible to this service", "name both in CUDA_VISIBLE_DEVICES")
    ours = device.ordinal or 0
    if not (cuda.can_access_peer(ours, peer) and cuda.can_access_peer(peer, ours)):
        raise _apart(
            theirs,
            f"is no peer of this service's {device.gpu_uuid}",
            "the service of the worker's GPU, or GPUs with NVLink (nvidia-smi topo -p2p r)",
        )


def _apart(theirs: str, problem: str, fix: str) -> ServiceError:
    return precondition("worker.gpu_uuid", f"{shown(theirs)} {problem}", fix)
