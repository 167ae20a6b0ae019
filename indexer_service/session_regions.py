"""The memory of one session that the service has mapped, by name.

Several regions may lie in one piece of memory; it is mapped once for each kind of access
(read-only, or writable where the service writes) and unmapped when the last region that uses
the mapping goes.

Methods block and are called one at a time; `k_cache` may be called from any thread.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch

from dsa_indexer.v1 import indexer_pb2 as pb
from indexer_service.errors import already_exists, invalid, not_found, precondition, shown
from indexer_service.validation import checked_regions, most_regions
from ipc_handoff.banks import (
    ANSWERS,
    BANK_REGIONS,
    CONTROL,
    K_CACHE_PREFIX,
    STAGING,
    StagingSlot,
    answer_slots,
    k_cache_region,
    staging_slots,
)
from ipc_handoff.control import ServiceControl
from ipc_handoff.descriptors import FIRST_REGION_TOKEN, Inbox
from ipc_handoff.layout import CACHE_LINE, HandoffGeometry
from ipc_handoff.regions import HostMemory, TensorSpec
from ipc_handoff.wire import region_spec

_WRITABLE = (CONTROL, ANSWERS)
# Scales of the K cache are float32 behind the bytes of a page.
_K_CACHE_ALIGNMENT = 4
_SCALE_BYTES = 4


@dataclass(frozen=True)
class _Access:
    """What is mapped once: a piece of memory, for reading or for writing."""

    token: int
    writable: bool


@dataclass
class _Mapping:
    memory: HostMemory
    users: int = 0


View = ServiceControl | list[StagingSlot] | list[torch.Tensor] | torch.Tensor


@dataclass(frozen=True)
class _Registered:
    access: _Access
    view: View


class SessionRegions:
    """Args:
    geometry, epoch: the session's; a control block must carry both.
    inbox: where the worker's descriptors arrive; None where none can.
    """

    def __init__(self, geometry: HandoffGeometry, epoch: int, inbox: Inbox | None) -> None:
        self._geometry = geometry
        self._epoch = epoch
        self._inbox = inbox
        self._mappings: dict[_Access, _Mapping] = {}
        self._regions: dict[str, _Registered] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._regions)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, each mapping once."""
        return sum(mapping.memory.byte_size for mapping in list(self._mappings.values()))

    @property
    def missing(self) -> list[str]:
        """Regions that a step needs and that are not registered."""
        return [name for name in BANK_REGIONS if name not in self._regions]

    def register(self, regions: Sequence[pb.Region]) -> None:
        """Map and check all of `regions`, or none.

        Raises:
            ServiceError: ALREADY_EXISTS for a name, FAILED_PRECONDITION for a token that no
                descriptor was sent under or memory of a GPU, INVALID_ARGUMENT for a description.
            HandoffError: what the data contract has against a region.
        """
        done: list[str] = []
        try:
            checked_regions(regions, self._geometry.layers)
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
        for region in islice(regions, most_regions(self._geometry.layers)):
            descriptor = self._take(region.host.token)
            if descriptor is not None:
                os.close(descriptor)

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
        """The staging slots; `missing` does not name them."""
        return cast(list[StagingSlot], self._regions[STAGING].view)

    def answers(self) -> list[torch.Tensor]:
        """The answer slots; `missing` does not name them."""
        return cast(list[torch.Tensor], self._regions[ANSWERS].view)

    def k_cache(self, layer: int) -> torch.Tensor | None:
        """A layer's K cache, uint8 [pages, page_size, head_dim + 4]; None if not registered."""
        registered = self._regions.get(k_cache_region(layer))
        return None if registered is None else cast(torch.Tensor, registered.view)

    def _register_one(self, region: pb.Region) -> None:
        if region.name in self._regions:
            raise already_exists(
                region.name, "is registered already", "unregister it first, or leave it out"
            )
        spec = region_spec(region)
        self._check_shape(region, spec)
        access = _Access(region.host.token, region.name in _WRITABLE)
        mapping = self._mapping(access, region.name)
        mapping.users += 1
        try:
            view = self._view(region, spec, mapping.memory)
        except BaseException:
            self._release(access)
            raise
        self._regions[region.name] = _Registered(access, view)

    def _view(self, region: pb.Region, spec: TensorSpec, memory: HostMemory) -> View:
        offset, geometry = region.host.offset, self._geometry
        # Also for the banks, whose views are many: it checks range and shape against the memory.
        tensor = memory.tensor(offset, region.byte_size, spec, region.name)
        if region.name == CONTROL:
            buffer = memory.view(offset, geometry.control.size)
            return ServiceControl(buffer, geometry, self._epoch)
        if region.name == STAGING:
            return staging_slots(memory, geometry, offset)
        if region.name == ANSWERS:
            return answer_slots(memory, geometry, offset)
        return tensor

    def _check_shape(self, region: pb.Region, spec: TensorSpec) -> None:
        if spec.dtype != torch.uint8:
            raise invalid(
                f"{region.name}.data_type", pb.DataType.Name(region.data_type), "DATA_TYPE_UINT8"
            )
        alignment = CACHE_LINE
        if region.name.startswith(K_CACHE_PREFIX):
            alignment = _K_CACHE_ALIGNMENT
            self._check_k_cache(region.name, spec)
        else:
            self._check_bank(region.name, spec)
        if region.host.offset % alignment:
            raise invalid(
                f"{region.name}.host.offset",
                f"{region.host.offset} is not a multiple of {alignment}",
                "align the region",
            )

    def _check_bank(self, name: str, spec: TensorSpec) -> None:
        needed = {
            CONTROL: self._geometry.control.size,
            STAGING: self._geometry.staging.size,
            ANSWERS: self._geometry.answers.size,
        }[name]
        if len(spec.shape) != 1 or spec.element_strides != (1,):
            raise invalid(
                f"{name}.shape",
                f"{list(spec.shape[:8])} with strides {list(spec.element_strides[:8])}",
                "one dimension of contiguous bytes",
            )
        if spec.shape[0] < needed:
            raise invalid(
                f"{name}.shape",
                f"{spec.shape[0]} bytes, the layout needs {needed}",
                "the layout's size for this geometry",
            )

    def _check_k_cache(self, name: str, spec: TensorSpec) -> None:
        page, width = self._geometry.page_size, self._geometry.head_dim + _SCALE_BYTES
        if len(spec.shape) != 3 or spec.shape[1:] != (page, width):
            raise invalid(f"{name}.shape", f"{list(spec.shape[:8])}", f"[pages, {page}, {width}]")
        between_pages, between_tokens, between_bytes = spec.element_strides
        if (between_tokens, between_bytes) != (width, 1):
            raise invalid(
                f"{name}.strides",
                f"{list(spec.element_strides)} is not dense inside a page",
                f"[any, {width}, 1]",
            )
        if between_pages < page * width or between_pages % _K_CACHE_ALIGNMENT:
            raise invalid(
                f"{name}.strides",
                f"{between_pages} bytes between pages",
                f"at least {page * width}, a multiple of {_K_CACHE_ALIGNMENT}",
            )

    def _mapping(self, access: _Access, name: str) -> _Mapping:
        mapping = self._mappings.get(access)
        if mapping is None:
            descriptor = self._descriptor(access, name)
            mapping = _Mapping(HostMemory.open(descriptor, writable=access.writable))
            self._mappings[access] = mapping
        return mapping

    def _descriptor(self, access: _Access, name: str) -> int:
        """A descriptor of our own for a new mapping."""
        other = self._mappings.get(_Access(access.token, not access.writable))
        if other is not None:
            # Mapped for the other kind of access: each mapping owns a descriptor.
            return os.dup(other.memory.fileno())
        if self._inbox is None:
            raise precondition(
                f"{name}.host", "no host memory is shared over TCP", "the service's Unix socket"
            )
        taken = self._take(access.token)
        if taken is None:
            raise precondition(
                f"{name}.host.token",
                f"no descriptor arrived under {access.token}",
                f"send it over the descriptor socket first, under {FIRST_REGION_TOKEN} or more",
            )
        return taken

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._release(self._regions.pop(name).access)

    def _release(self, access: _Access) -> None:
        mapping = self._mappings[access]
        mapping.users -= 1
        if not mapping.users:
            del self._mappings[access]
            mapping.memory.close()

    def _take(self, token: int) -> int | None:
        """The descriptor that waits under a region's token; the eventfds' are not regions'."""
        if self._inbox is None or token < FIRST_REGION_TOKEN:
            return None
        return self._inbox.take(token)
