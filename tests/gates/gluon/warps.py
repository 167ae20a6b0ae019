"""What a group of warps may rely on: which accesses to shared memory lie in its past.

Each agent counts its accesses: the threads of the group themselves, their asynchronous copies
(cp.async), their matrix products, and the copy engine for each barrier. A clock says of each agent
up to which access it is done. Order comes from:

- `thread_barrier`: for all threads, what each thread did or waited for before;
- a barrier in shared memory: who waits knows what was published in the phase. An arrival of one
  thread publishes what the group's last thread barrier had made common; arrivals of copies publish
  the copies; the copy engine its writes;
- `fence_async_shared`: matrix products see ordinary stores and cp.async only behind it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

LOAD, STORE, COPY, PRODUCT, TENSOR_COPY = (
    "load", "store", "copy", "matrix product", "tensor copy",
)  # fmt: skip
READS = (LOAD, PRODUCT)
_OWN = (LOAD, STORE)

Clock = dict[Hashable, int]


def join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        clock[agent] = max(clock.get(agent, 0), time)


@dataclass(frozen=True)
class Access:
    """One access; `time` counts those of its agent (of threads: their barriers and fences)."""

    kind: str
    agent: Hashable
    time: int


@dataclass
class Warps:
    """A group of warps that run one program text: all of a program, or a partition of it."""

    name: str
    count: int
    seen: Clock = field(default_factory=dict)
    """What is in the past of every thread."""
    fenced: Clock = field(default_factory=dict)
    """Of what was written the ordinary way: what matrix products see."""
    _fencing: Clock = field(default_factory=dict)
    _now: int = 1
    copies: int = 0
    _groups: list[int] = field(default_factory=list)
    _copies_done: int = 0
    products: int = 0
    _products_done: int = 0

    @property
    def copying(self) -> Hashable:
        return self.name, COPY

    @property
    def multiplying(self) -> Hashable:
        return self.name, PRODUCT

    def barrier(self) -> None:
        done = {self.copying: self._copies_done, self.multiplying: self._products_done}
        join(self.seen, {self.name: self._now, **done})
        join(self.fenced, self._fencing)
        self._now += 1

    def fence(self) -> None:
        """Each thread's; what it stored or copied itself counts for others after a barrier."""
        join(self.fenced, self.seen)
        self._fencing = {self.name: self._now, self.copying: self._copies_done}
        self._now += 1

    def access(self, kind: str) -> Access:
        """A load or store now."""
        return Access(kind, self.name, self._now)

    def start_copy(self) -> Access:
        self.copies += 1
        return Access(COPY, self.copying, self.copies)

    def commit_copies(self) -> None:
        self._groups.append(self.copies)

    def wait_for_copies(self, outstanding: int) -> None:
        """As cp.async.wait_group: copies that were never committed are not waited for."""
        done = self._groups[: max(0, len(self._groups) - outstanding)]
        self._copies_done = max(self._copies_done, *done, 0)

    def start_product(self) -> Access:
        self.products += 1
        return Access(PRODUCT, self.multiplying, self.products)

    def wait_for_products(self, outstanding: int) -> None:
        self._products_done = max(self._products_done, self.products - outstanding)

    def has_product(self, number: int) -> bool:
        return number <= self._products_done

    def knows(self, earlier: Access, later: Access) -> bool:
        """Whether `earlier` comes before `later`, which these warps start, for all threads."""
        if later.kind == PRODUCT and earlier.kind in (STORE, COPY):
            return self.fenced.get(earlier.agent, 0) >= earlier.time
        if later.kind in _OWN:
            # Triton itself puts barriers between loads, stores and waited-for products.
            if earlier.agent == self.name:
                return True
            if earlier.agent == self.multiplying:
                return self._products_done >= earlier.time
        return self.seen.get(earlier.agent, 0) >= earlier.time
