"""The control block of one attachment as one object a side: header, words, rings and stamps."""

import struct

from ipc_handoff.doorbells import ServiceBells, WorkerBells
from ipc_handoff.errors import LayoutMismatch
from ipc_handoff.generations import Generations
from ipc_handoff.layout import LAYOUT_VERSION, MAGIC, HandoffGeometry
from ipc_handoff.ring import RingConsumer, RingProducer
from ipc_handoff.stages import SERVICE_STAGES
from ipc_handoff.stamps import StampRing

_HEADER = struct.Struct("<QQQQ")  # magic, layout version, fingerprint, epoch


class _Control:
    def __init__(self, buffer: memoryview, geometry: HandoffGeometry) -> None:
        self._layout = geometry.control
        if len(buffer) < self._layout.size:
            raise LayoutMismatch(
                f"control: {len(buffer)} bytes, the layout needs {self._layout.size}"
            )
        self._buffer = buffer
        self.service_stamps = StampRing(
            self._area("service_stamps"), len(geometry.layers), len(SERVICE_STAGES)
        )

    def _area(self, name: str) -> memoryview:
        return self._layout.areas[name].of(self._buffer)


class WorkerControl(_Control):
    """The worker's side; made by the owner of the memory.

    `start` resets the block for a new attachment: nobody else may be mapped to it then.

    Attributes:
        generation: how many attachments have used the bank.
    """

    bells: WorkerBells
    generations: Generations
    plans: RingProducer
    reports: RingConsumer

    def __init__(self, buffer: memoryview, geometry: HandoffGeometry) -> None:
        super().__init__(buffer, geometry)
        self._geometry = geometry
        self.generation = 0

    def start(self, epoch: int) -> None:
        layout = self._layout
        self.generation += 1
        self._buffer[:] = bytes(len(self._buffer))
        header = _HEADER.pack(MAGIC, LAYOUT_VERSION, self._geometry.fingerprint, epoch)
        self._buffer[: _HEADER.size] = header
        self.bells = WorkerBells(self._buffer, layout)
        self.generations = Generations(self._buffer, layout)
        self.plans = RingProducer(
            self._area("plans"), self._area("plans_consumed"), layout.plan_slot
        )
        self.reports = RingConsumer(
            self._area("reports"), self._area("reports_consumed"), layout.report_slot
        )


class ServiceControl(_Control):
    """The service's side.

    Raises:
        LayoutMismatch: the header is not of this layout and epoch.
    """

    def __init__(self, buffer: memoryview, geometry: HandoffGeometry, epoch: int) -> None:
        super().__init__(buffer, geometry)
        found = _HEADER.unpack(buffer[: _HEADER.size])
        wanted = (MAGIC, LAYOUT_VERSION, geometry.fingerprint, epoch)
        if found != wanted:
            raise LayoutMismatch(
                "control: header (magic, version, fingerprint, epoch) is "
                f"{found}, expected {wanted} (fix: the same dsa-indexer version on both sides)"
            )
        layout = self._layout
        self.bells = ServiceBells(buffer, layout)
        self.generations = Generations(buffer, layout)
        self.plans = RingConsumer(
            self._area("plans"), self._area("plans_consumed"), layout.plan_slot
        )
        self.reports = RingProducer(
            self._area("reports"), self._area("reports_consumed"), layout.report_slot
        )
