"""Barriers in shared memory (mbarrier): arrivals, bytes that copies bring, and phases."""

from dataclasses import dataclass, field

from tests.gates.gluon.warps import Clock, Warps, join
from tests.gates.ordering import Race


@dataclass
class MBarrier:
    """One barrier since its `init`."""

    name: str
    count: int
    """Arrivals that complete a phase, together with all bytes that were expected."""
    made: Clock
    """What must be in the past of who uses it."""
    phase: int = 0
    arrived: int = 0
    awaited: int = 0
    """Bytes still to come."""
    copies: int = 0
    """Of the copy engine, so far."""
    _seen: Clock = field(default_factory=dict)
    _fenced: Clock = field(default_factory=dict)
    _published: tuple[Clock, Clock] = field(default_factory=lambda: ({}, {}))

    def check_use(self, warps: Warps) -> None:
        if any(warps.seen.get(agent, 0) < time for agent, time in self.made.items()):
            raise Race(f"{self.name}: nothing orders its use by {warps.name} after its init")

    def expect(self, size: int) -> None:
        """As mbarrier.arrive.expect_tx, which is what Triton makes of it."""
        self.awaited += size
        self.arrive(1, {}, {})

    def bring(self, size: int, seen: Clock) -> None:
        """A copy of the engine's is done."""
        self.awaited -= size
        join(self._seen, seen)
        self._complete()

    def arrive(self, count: int, seen: Clock, fenced: Clock) -> None:
        self.arrived += count
        if self.arrived > self.count:
            raise Race(f"{self.name}: {self.arrived} arrivals in a phase of {self.count}")
        join(self._seen, seen)
        join(self._fenced, fenced)
        self._complete()

    def passed(self, parity: int) -> bool:
        """Whether who waits for the phase of this parity may go on."""
        return self.phase & 1 != parity & 1

    def acquire(self, warps: Warps) -> None:
        seen, fenced = self._published
        join(warps.seen, seen)
        join(warps.fenced, fenced)

    def _complete(self) -> None:
        if self.arrived == self.count and self.awaited == 0:
            self.phase += 1
            self.arrived = 0
            join(self._published[0], self._seen)
            join(self._published[1], self._fenced)

    def __str__(self) -> str:
        return (
            f"{self.name} (phase {self.phase}, {self.arrived} of {self.count} arrived, "
            f"{self.awaited} bytes to come)"
        )
