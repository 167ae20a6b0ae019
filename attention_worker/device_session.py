"""The worker's session on a GPU: every selection from the service, or computed here.

with DeviceIndexer(geometry, k_caches, device=device) as indexer:
    indexer.begin_step(inputs)  # eagerly, before every forward
    indexer.select(layer, q, weights, topk_indices)  # in the forward, captured or not
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention_worker.captures import leave_captures_alone
from attention_worker.device_handoff import DeviceHandoff
from attention_worker.device_steps import DeviceSteps
from attention_worker.inline_kernels import InlineKernels
from attention_worker.placements import Chosen, Placement, choose
from attention_worker.replicas import allocate_replicas
from attention_worker.timeslice_handoff import TimesliceHandoff
from attention_worker.worker_banks import WorkerBank
from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_client.attachment import AttachRequest, worker_identity
from indexer_client.control_plane import check_tls
from indexer_client.errors import AttachRefused
from indexer_client.metrics import start_metrics
from indexer_client.settings import ClientSettings
from indexer_service.kernels import k_cache
from indexer_service.kernels.configuration import TRITON, configuration
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.k_cache.layout import check_k_cache
from indexer_service.kernels.warm_up import Progress, warm_up
from ipc_handoff import cuda_runtime
from ipc_handoff.banks import Bank, BankPool, k_cache_region
from ipc_handoff.detectors import Detector, detectors
from ipc_handoff.errors import RegionError
from ipc_handoff.findings import FindingListener
from ipc_handoff.kernels.worker_memory import WorkerMemory
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import SharedTensor
from ipc_handoff.telemetry.metrics import Metrics
from ipc_handoff.telemetry.tracing import Tracing
from ipc_handoff.telemetry.tracing import start as start_tracing

logger = logging.getLogger(__name__)

_WAIT_BOUND_SECONDS = 0.02

_QUARANTINE_SECONDS = 2.0
"""What a dead service had begun on a GPU may run on: its gates, for their bound, and the rest.

The worker is not told of that bound: docs/service.md says what it may be at most.
"""

_FEWEST_SLOTS = 2
"""A step's staging must still be there when the next one is published."""

_ASKED_FOR = AttachRefused("placement: inline was asked for (fix: auto, to use a service)")

_PLACEMENTS = {
    Placement.MPS: pb.PLACEMENT_MPS,
    Placement.PEER_GPU: pb.PLACEMENT_PEER_GPU,
    Placement.TIMESLICE: pb.PLACEMENT_TIMESLICE,
}


class DeviceIndexer(DeviceSteps):
    """Make it, and `warm_up`, before the first capture: graphs hold its addresses. Keep it for
    as long as they are replayed. Used by one thread and one stream; not after a fork.

    Attributes:
        placement: chosen once; graphs hold it.
        placement_reason: why, in a sentence.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        k_caches: Mapping[int, Tensor],
        *,
        device: torch.device,
        settings: ClientSettings | None = None,
        service_device: int | None = None,
        engine_name: str = "",
        model: str = "target",
        workspace: int | None = None,
        tracing: Tracing | None = None,
        metrics: Metrics | None = None,
        findings: FindingListener | None = None,
    ) -> None:
        """
        Args:
            geometry: the indexer's shape and limits; 2 slots or more.
            k_caches: by layer, uint8 [pages, page, D+4] on `device`, pages at any stride.
            device: the worker's GPU.
            settings: address, placement, bounds; from `DSA_INDEXER_*` by default.
            service_device: ordinal of the service's GPU in this process, if it is another one.
            engine_name, model: for people and for telling a worker's models apart.
            workspace: bytes for the inline kernels' temporaries (default: 256 MiB).
            tracing, metrics: where spans and metrics go; by default what the settings say.
                Closed with the session.
            findings: told of what the detectors find, besides the log.

        Raises:
            ValueError: a K cache is missing or wrong, or the worker is not on a GPU.
        """
        settings = settings or ClientSettings()
        check_tls(settings)
        _check(geometry, k_caches, device)
        own = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", own)
        terms = _agree(
            geometry,
            k_caches,
            choose(Placement(settings.placement), device, service_device),
            own,
            settings,
        )
        self.placement, self.placement_reason = terms.chosen.placement, terms.chosen.reason
        refusal = AttachRefused(terms.chosen.reason) if terms.chosen.is_refusal else None
        if refusal is not None:
            logger.warning("working inline: %s", refusal)
        self._workspace = workspace
        self._k_caches, self._shared = dict(k_caches), terms.shared
        handoff = terms.handoff
        worker = worker_identity(str(uuid.uuid4()), model, engine_name)
        worker.gpu_uuid = cuda_runtime.device_uuid(own)
        super().__init__(
            AttachRequest(
                settings=settings,
                worker=worker,
                geometry=geometry,
                k_caches=terms.shared,
                configuration_hash=configuration(TRITON, device).hash,
                tracing=tracing or start_tracing(settings.tracing),
                placement=_PLACEMENTS.get(self.placement, pb.PLACEMENT_UNSPECIFIED),
                flags=handoff.flags if isinstance(handoff, TimesliceHandoff) else None,
            ),
            terms.pool,
            InlineKernels(geometry, k_caches, device, workspace=workspace),
            handoff,
            device=device,
            metrics=metrics or start_metrics(settings),
            refusal=refusal or (_ASKED_FOR if handoff is None else None),
            prepare_thread=leave_captures_alone,
            findings=findings,
        )

    def warm_up(self, next_n: Sequence[int] = (1,), *, progress: Progress | None = None) -> None:
        """Make every kernel that a step can need; before `start` and the first capture.

        Tunes what this kind of GPU was never tuned for, which takes minutes, and is remembered.

        Args:
            next_n: rows of a decode request, all that occur.
            progress: as for `kernels.warm_up`.
        """
        geometry = self.geometry
        replica = None
        if self.placement is Placement.PEER_GPU:
            replica = next(iter(self._shared.values())).tensor.device
        kernels = Geometry(
            heads=geometry.heads,
            max_context=geometry.max_context,
            max_decode_rows=geometry.max_rows,
            max_prefill_rows=geometry.max_rows,
            head_dim=geometry.head_dim,
            page=geometry.page_size,
            page_stride=next(iter(self._k_caches.values())).stride(0),
            k=geometry.top_k,
            next_n=tuple(next_n),
            workspace=self._workspace,
            replica=replica,
        )
        warm_up(kernels, self._device, progress=progress)
        super().warm_up(next_n)

    def insert(self, k: Tensor, slots: Tensor, layer: int) -> None:
        """Quantise keys into a layer's K cache, and into its replica where there is one.

        Nothing else may write the cache: a replica would not have it.

        Args:
            k: bf16 or fp16 [T, D]; slots: int64 [n], n <= T, negative: none.
        """
        replica = None
        if self.placement is Placement.PEER_GPU:
            replica = self._shared[layer].tensor
        k_cache.insert(k, slots, self._k_caches[layer], replica=replica)


@dataclass(frozen=True)
class _Terms:
    """What is shared with a service, under the chosen placement; nothing under `inline`."""

    chosen: Chosen
    shared: Mapping[int, SharedTensor]
    pool: BankPool
    handoff: DeviceHandoff | None


def _agree(
    geometry: HandoffGeometry,
    k_caches: Mapping[int, Tensor],
    chosen: Chosen,
    own: int,
    settings: ClientSettings,
) -> _Terms:
    make_bank = partial(_make_bank, geometry, chosen.service_device, own)
    if chosen.service_device is not None:
        try:
            if chosen.placement is Placement.PEER_GPU:
                shared = allocate_replicas(k_caches, chosen.service_device)
            else:
                shared = {
                    layer: SharedTensor.of_cuda(tensor, k_cache_region(layer))
                    for layer, tensor in k_caches.items()
                }
            handoff = _make_handoff(geometry, chosen.placement, own, settings)
            pool = BankPool(make_bank, settings.banks, quarantine_seconds=_QUARANTINE_SECONDS)
            return _Terms(chosen, shared, pool, handoff)
        except RegionError as error:
            chosen = Chosen(Placement.INLINE, None, str(error), is_refusal=True)
    return _Terms(chosen, {}, BankPool(make_bank, banks=0), None)


def _make_handoff(
    geometry: HandoffGeometry, placement: Placement, own: int, settings: ClientSettings
) -> DeviceHandoff:
    kind = TimesliceHandoff if placement is Placement.TIMESLICE else DeviceHandoff
    enabled = detectors(settings.detectors)
    memory = WorkerMemory(
        geometry,
        torch.device("cuda", own),
        checks_generations=Detector.GENERATIONS in enabled,
        checks_shared_indices=Detector.SHARED_INDICES in enabled,
    )
    return kind(memory, _wait_bound(settings))


def _wait_bound(settings: ClientSettings) -> float:
    """A GPU's wait is shorter than a CPU's, unless somebody has set it."""
    if "wait_bound_seconds" in settings.model_fields_set:
        return settings.wait_bound_seconds
    return _WAIT_BOUND_SECONDS


def _make_bank(
    geometry: HandoffGeometry, service_device: int | None, own: int, number: int
) -> Bank:
    return WorkerBank(geometry, number, own if service_device is None else service_device, own)


def _check(geometry: HandoffGeometry, k_caches: Mapping[int, Tensor], device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"device: {device} (fix: a GPU, or indexer_client.Session on a CPU)")
    if geometry.slots < _FEWEST_SLOTS:
        raise ValueError(f"slots: {geometry.slots} (fix: {_FEWEST_SLOTS} or more on a GPU)")
    missing = set(geometry.layers) - set(k_caches)
    if missing:
        raise ValueError(f"k_caches: layer {min(missing)} is missing (fix: one a layer)")
    for tensor in k_caches.values():
        check_k_cache(tensor)
