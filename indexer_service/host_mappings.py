"""Host memory of one session, mapped once for each kind of access.

Several regions may lie in one piece of memory; a mapping goes with the last region that uses it.
"""

import os
from dataclasses import dataclass

from indexer_service.errors import precondition
from ipc_handoff.descriptors import FIRST_REGION_TOKEN, Inbox
from ipc_handoff.regions import HostMemory


@dataclass(frozen=True)
class HostAccess:
    """What is mapped once: a piece of memory, for reading or for writing."""

    token: int
    writable: bool


@dataclass
class _Mapping:
    memory: HostMemory
    users: int = 0


class HostMappings:
    """Args:
    inbox: where the worker's descriptors arrive; None where none can.
    """

    def __init__(self, inbox: Inbox | None) -> None:
        self._inbox = inbox
        self._mappings: dict[HostAccess, _Mapping] = {}

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, each mapping once."""
        return sum(mapping.memory.byte_size for mapping in list(self._mappings.values()))

    def acquire(self, access: HostAccess, name: str) -> HostMemory:
        """The memory, mapped if nobody has it yet; each call needs a `release`.

        Raises:
            ServiceError: FAILED_PRECONDITION for a token that no descriptor was sent under.
            RegionError: a descriptor that cannot be mapped.
        """
        mapping = self._mappings.get(access)
        if mapping is None:
            descriptor = self._descriptor(access, name)
            mapping = _Mapping(HostMemory.open(descriptor, writable=access.writable))
            self._mappings[access] = mapping
        mapping.users += 1
        return mapping.memory

    def release(self, access: HostAccess) -> None:
        mapping = self._mappings[access]
        mapping.users -= 1
        if not mapping.users:
            del self._mappings[access]
            mapping.memory.close()

    def drop(self, token: int) -> None:
        """Close the descriptor that waits to be mapped under a token, if any."""
        descriptor = self._take(token)
        if descriptor is not None:
            os.close(descriptor)

    def _descriptor(self, access: HostAccess, name: str) -> int:
        """A descriptor of our own for a new mapping."""
        other = self._mappings.get(HostAccess(access.token, not access.writable))
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

    def _take(self, token: int) -> int | None:
        """The descriptor that waits under a region's token; the eventfds' are not regions'."""
        if self._inbox is None or token < FIRST_REGION_TOKEN:
            return None
        return self._inbox.take(token)
