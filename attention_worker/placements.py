"""Where the service works, as the worker chooses it: once, before the first graph is captured.

A captured graph holds how its waits are made, so that a service under another placement is refused
and the worker stays inline.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from ipc_handoff import cuda_runtime
from ipc_handoff.errors import RegionError


class Placement(StrEnum):
    """By the names of the settings."""

    AUTO = "auto"
    """Whatever the host gives."""
    MPS = "mps"
    """The same GPU under NVIDIA MPS: both processes' kernels run at once, and waits poll."""
    PEER_GPU = "peer_gpu"
    """Another GPU of the host, with a replica of the K cache there."""
    TIMESLICE = "timeslice"
    """The same GPU without MPS: contexts take turns, and nothing may poll."""
    INLINE = "inline"
    """No service."""
    CPU = "cpu"
    """Both processes on the CPU: `indexer_client.Session`."""


@dataclass(frozen=True)
class Chosen:
    """Attributes:
    placement: not AUTO.
    service_device: ordinal of the GPU that the service works on, in this process; None without.
    reason: a sentence for people.
    is_refusal: somebody wanted another placement than inline and does not get it.
    """

    placement: Placement
    service_device: int | None
    reason: str
    is_refusal: bool = False


def choose(wanted: Placement, device: torch.device, service_device: int | None = None) -> Chosen:
    """The placement of a worker.

    Args:
        device: of the worker.
        service_device: ordinal of the service's GPU in this process, if it is another one.
    """
    if device.type != "cuda":
        return Chosen(Placement.CPU, None, "The worker is not on a GPU.")
    if wanted is Placement.CPU:
        return _inline("placement: cpu, but the worker is on a GPU (fix: mps or auto)")
    if wanted is Placement.INLINE:
        return Chosen(Placement.INLINE, None, "It was asked for.")
    if cuda_runtime.launches_block():
        return _inline(
            "CUDA_LAUNCH_BLOCKING: is set, and every wait for the service would hold the engine "
            "(fix: unset it)"
        )
    own = device.index or 0
    if wanted is Placement.AUTO:
        wanted = _automatic(own, service_device)
    if wanted is Placement.PEER_GPU:
        return _peer(own, service_device)
    if wanted is Placement.MPS and not cuda_runtime.runs_under_mps(own):
        return _inline(
            f"placement: mps, but no MPS daemon serves GPU {own} (fix: nvidia-cuda-mps-control -d "
            "before engine and service start, in the same CUDA_MPS_PIPE_DIRECTORY)"
        )
    if wanted is Placement.TIMESLICE:
        return Chosen(
            wanted,
            own,
            "The worker's GPU is shared without MPS: processes take turns, which costs a layer "
            "some hundred microseconds.",
        )
    return Chosen(Placement.MPS, own, "The worker's GPU is shared under MPS.")


def _automatic(own: int, service_device: int | None) -> Placement:
    if service_device not in (None, own):
        return Placement.PEER_GPU
    return Placement.MPS if cuda_runtime.runs_under_mps(own) else Placement.TIMESLICE


def _peer(own: int, peer: int | None) -> Chosen:
    if peer is None or peer == own:
        return _inline(
            f"service_device: {peer}, the worker is on {own} (fix: the ordinal of the service's "
            "own GPU, as this process sees it)"
        )
    try:
        reachable = cuda_runtime.can_access_peer(own, peer)
    except RegionError as error:
        return _inline(str(error))
    if not reachable:
        return _inline(
            f"service_device: GPU {own} cannot write to GPU {peer} (fix: GPUs with NVLink or peer "
            "access over PCIe)"
        )
    return Chosen(Placement.PEER_GPU, peer, f"The service has GPU {peer} for itself.")


def _inline(reason: str) -> Chosen:
    return Chosen(Placement.INLINE, None, reason, is_refusal=True)
