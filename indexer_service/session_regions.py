"""The memory of one session that the service has mapped, by name.

Several regions may lie in one piece of memory; it is mapped once (host memory: for each kind of
access) and unmapped when the last region that uses the mapping goes. The control block is always
host memory; staging, answers and K caches are, in a session on a GPU, that GPU's or a peer's.

Methods block and are called one at a time; `k_cache` may be called from any thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import cast

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.agreement import Agreement
from indexer_service.errors import already_exists, not_found, precondition, shown
from indexer_service.host_mappings import HostAccess, HostMappings
from indexer_service.region_shapes import check_shape
from indexer_service.validation import checked_regions, most_regions
from ipc_handoff.banks import (
    ANSWERS,
    BANK_REGIONS,
    CONTROL,
    STAGING,
    StagingSlot,
    answer_slots,
    k_cache_region,
    staging_slots,
)
from ipc_handoff.control import ServiceControl
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.descriptors import Inbox
from ipc_handoff.flag_words import FLAGS
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.wire import cuda_export, region_spec

_WRITABLE = (CONTROL, ANSWERS, FLAGS)


@dataclass(frozen=True)
class DeviceTerms:
    """Where a session's device memory lies and whose it is.

    Attributes:
        ordinal: of the service's GPU: device memory is opened for its kernels.
        owner: the worker's name for its life.
        service_gpu, worker_gpu: UUIDs; the same unless the placement is peer_gpu.
        has_flags: the worker shares its flags: streams sleep on them.
    """

    ordinal: int
    owner: str
    service_gpu: str
    worker_gpu: str
    has_flags: bool = False

    def gpu_of(self, name: str) -> str:
        """UUID of the GPU that a region lies on: its reader's."""
        return self.worker_gpu if name == ANSWERS else self.service_gpu


def device_terms(agreement: Agreement) -> DeviceTerms | None:
    """Of a session's memory; None on the CPU."""
    device, worker = agreement.device, agreement.worker
    if device.ordinal is None:
        return None
    return DeviceTerms(
        device.ordinal,
        worker.instance,
        device.gpu_uuid,
        worker.gpu_uuid,
        has_flags=agreement.placement == pb.PLACEMENT_TIMESLICE,
    )


@dataclass(frozen=True)
class DeviceViews:
    """A complete bank in device memory, as the service uses it; see `geometry.device`.

    Valid until one of the bank's regions is given back.

    Attributes:
        staging_address, answers_address: of the regions' first bytes in this process.
    """

    staging_address: int
    answers_address: int


# The slots of a bank in host memory, the address of one in device memory, a K cache, flags.
View = ServiceControl | list[StagingSlot] | list[torch.Tensor] | int | torch.Tensor | HostMemory


@dataclass(frozen=True)
class _Registered:
    """device_bytes: of device memory; host memory counts with its mapping."""

    view: View
    release: Callable[[], None]
    device_bytes: int = 0


class SessionRegions:
    """Args:
    geometry, epoch: the session's; a control block must carry both.
    inbox: where the worker's descriptors arrive; None where none can.
    device: where its device memory lies; None for a session on the CPU.
    """

    def __init__(
        self,
        geometry: HandoffGeometry,
        epoch: int,
        inbox: Inbox | None,
        device: DeviceTerms | None = None,
    ) -> None:
        self._geometry = geometry
        self._epoch = epoch
        self._device = device
        self._host = HostMappings(inbox)
        self._regions: dict[str, _Registered] = {}
        has_flags = device is not None and device.has_flags
        self.bank_names = (*BANK_REGIONS, FLAGS) if has_flags else BANK_REGIONS

    @property
    def names(self) -> list[str]:
        return sorted(self._regions)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, each mapping once."""
        in_device_memory = sum(region.device_bytes for region in list(self._regions.values()))
        return self._host.mapped_bytes + in_device_memory

    @property
    def missing(self) -> list[str]:
        """Regions that a step needs and that are not registered."""
        return [name for name in self.bank_names if name not in self._regions]

    def register(self, regions: Sequence[pb.Region]) -> None:
        """Map and check all of `regions`, or none.

        Raises:
            ServiceError: ALREADY_EXISTS for a name, FAILED_PRECONDITION for a token that no
                descriptor was sent under or memory of the wrong kind or GPU, INVALID_ARGUMENT
                for a description.
            HandoffError: what the data contract has against a region.
        """
        done: list[str] = []
        try:
            checked_regions(
                regions,
                self._geometry.layers,
                on_gpu=self._device is not None,
                bank=self.bank_names,
            )
            for region in regions:
                self._register_one(region)
                done.append(region.name)
        except BaseException:
            self._remove(done)
            raise

    def drop_descriptors(self, regions: Sequence[pb.Region]) -> None:
        """Close the descriptors that wait to be mapped for `regions`.

        Of a list that is too long to be right only those of its beginning.
        """
        for region in islice(regions, most_regions(self._geometry.layers, self.bank_names)):
            self._host.drop(region.host.token)

    def unregister(self, names: Sequence[str]) -> None:
        """Give back all of `names`, or none.

        Raises:
            ServiceError: NOT_FOUND for a name that is not registered.
        """
        self.check_registered(names)
        self._remove(names)

    def check_registered(self, names: Sequence[str]) -> None:
        """Raise NOT_FOUND unless all of `names` are registered."""
        for name in names:
            if name not in self._regions:
                raise not_found(
                    "names", f"{shown(name)} is not registered", "give a region back once"
                )

    def close(self) -> None:
        """Give everything back."""
        self._remove(list(self._regions))

    def control(self) -> ServiceControl:
        """The control block; `missing` does not name it."""
        return cast(ServiceControl, self._regions[CONTROL].view)

    def staging(self) -> list[StagingSlot]:
        """The staging slots of a session on the CPU; `missing` does not name them."""
        return cast(list[StagingSlot], self._regions[STAGING].view)

    def answers(self) -> list[torch.Tensor]:
        """The answer slots of a session on the CPU; `missing` does not name them."""
        return cast(list[torch.Tensor], self._regions[ANSWERS].view)

    def device_views(self) -> DeviceViews | None:
        """The bank of a session on a GPU, which `missing` does not name; None on the CPU."""
        if self._device is None:
            return None
        staging, answers = (cast(int, self._regions[name].view) for name in (STAGING, ANSWERS))
        return DeviceViews(staging, answers)

    def flags(self) -> HostMemory | None:
        """The worker's flags, which `missing` does not name; None where nobody sleeps on any."""
        registered = self._regions.get(FLAGS)
        return None if registered is None else cast(HostMemory, registered.view)

    def k_cache(self, layer: int) -> torch.Tensor | None:
        """A layer's K cache, uint8 [pages, page_size, head_dim + 4], on the session's device;
        None if not registered."""
        registered = self._regions.get(k_cache_region(layer))
        return None if registered is None else cast(torch.Tensor, registered.view)

    def _register_one(self, region: pb.Region) -> None:
        if region.name in self._regions:
            raise already_exists(
                region.name, "is registered already", "unregister it first, or leave it out"
            )
        spec = region_spec(region)
        check_shape(region, spec, self._geometry)
        make = self._of_host if region.HasField("host") else self._of_device
        self._regions[region.name] = make(region, spec)

    def _of_host(self, region: pb.Region, spec: TensorSpec) -> _Registered:
        access = HostAccess(region.host.token, region.name in _WRITABLE)
        memory = self._host.acquire(access, region.name)
        release = partial(self._host.release, access)
        try:
            return _Registered(self._host_view(region, spec, memory), release)
        except BaseException:
            release()
            raise

    def _host_view(self, region: pb.Region, spec: TensorSpec, memory: HostMemory) -> View:
        offset, geometry = region.host.offset, self._geometry
        # Also for the banks, whose views are many: it checks range and shape against the memory.
        tensor = memory.tensor(offset, region.byte_size, spec, region.name)
        if region.name == FLAGS:
            return memory
        if region.name == CONTROL:
            buffer = memory.view(offset, geometry.control.size)
            return ServiceControl(buffer, geometry, self._epoch)
        if region.name == STAGING:
            return staging_slots(memory, geometry, offset)
        if region.name == ANSWERS:
            return answer_slots(memory, geometry, offset)
        return tensor

    def _of_device(self, region: pb.Region, spec: TensorSpec) -> _Registered:
        assert self._device is not None  # `checked_regions` has seen to it
        export, expected = cuda_export(region), self._device.gpu_of(region.name)
        if export.gpu_uuid != expected:
            raise precondition(
                f"{region.name}.cuda_ipc.gpu_uuid",
                f"{shown(export.gpu_uuid)}, agreed {expected}",
                "memory of the GPU that the placement asks for",
            )
        memory = CudaMemory.open(
            export,
            owner=self._device.owner,
            device=self._device.ordinal,
            field_name=region.name,
        )
        try:
            if region.name in BANK_REGIONS:
                memory.check_view(0, memory.byte_size, spec, region.name)
                view: View = memory.pointer
            else:
                view = memory.tensor(0, memory.byte_size, spec, region.name)
        except BaseException:
            memory.close()
            raise
        return _Registered(view, memory.close, memory.byte_size)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._regions.pop(name).release()
