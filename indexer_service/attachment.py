"""The worker's memory and wake-ups of one attachment, as the service sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from indexer_service.session_regions import DeviceViews
from ipc_handoff.banks import StagingSlot
from ipc_handoff.control import ServiceControl
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.regions import HostMemory
from ipc_handoff.wakeups import Wakeup


@dataclass(frozen=True)
class HostViews:
    """A bank in host memory: its slots."""

    staging: Sequence[StagingSlot]
    answers: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Attachment:
    """Attributes:
    bank: in the memory that the session's steps are computed in.
    engine, placement: what was agreed, by name.
    k_cache: of a layer, uint8 [pages, page_size, head_dim + 4]; None if not registered.
    flags: what both sides' streams sleep on, where nothing may poll.
    """

    epoch: int
    geometry: HandoffGeometry
    control: ServiceControl
    bank: HostViews | DeviceViews
    k_cache: Callable[[int], torch.Tensor | None]
    wake_service: Wakeup
    wake_worker: Wakeup
    flags: HostMemory | None = None
    engine: str = ""
    placement: str = ""
