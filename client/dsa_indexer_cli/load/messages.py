"""What a session's process tells the one that started it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np

from dsa_indexer_cli.load.worker import Opened, Worker
from dsa_indexer_cli.load.workload import AUTO, Workload
from indexer_client import ClientSettings


class Column(IntEnum):
    """Of a step's record; behind these come the nanoseconds of its layers, where they are known.

    Times are nanoseconds of the monotonic clock, which all processes of a machine share. A step
    that was never begun has BEGAN -1, and in ENDED the time at which it was given up. FORWARD is
    how long the GPU took for all layers, in nanoseconds, or -1. On a GPU the INLINE layers of all
    steps since the last report are counted on the last of them.
    """

    INTENDED = 0
    BEGAN = 1
    ENDED = 2
    KIND = 3
    REQUESTS = 4
    ROWS = 5
    LONGEST = 6
    LAYERS = 7
    INLINE = 8
    FORWARD = 9


NOT_BEGUN = -1


def width(workload_layers: int) -> int:
    """Columns of a record."""
    return len(Column) + workload_layers


@dataclass(frozen=True)
class Order:
    """What a session shall do.

    Attributes:
        address: of the service; empty: there is none, and all is computed inline.
        make_worker: called in the session's process.
        service_gpu: UUID of the GPU that the service is on; empty on a CPU.
        environment: variables for the session's process.
    """

    number: int
    address: str
    workload: Workload
    make_worker: "WorkerFactory"
    service_gpu: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Sessions differ, and a session of the same number repeats."""
        return self.workload.steps.seed * 1009 + self.number

    def settings(self) -> ClientSettings:
        """The client's: what the workload does not say stays its default, or the environment's."""
        load = self.workload.load
        said: dict[str, Any] = {"signalling": load.signalling}
        if self.address:
            said["address"] = self.address
        if load.placement != AUTO:
            said["placement"] = load.placement
        if load.wait_bound_seconds is not None:
            said["wait_bound_seconds"] = load.wait_bound_seconds
        return ClientSettings(**said)


WorkerFactory = Callable[[Order], Worker]


@dataclass(frozen=True)
class Preparing:
    """What a session does before it is ready."""

    doing: str


@dataclass(frozen=True)
class Ready:
    """Attached, and waiting for the time to start."""

    opened: Opened


@dataclass(frozen=True)
class Records:
    """Steps that have ended: int64 [n, width], as bytes."""

    data: bytes

    def rows(self, layers: int) -> np.ndarray:
        return np.frombuffer(self.data, np.int64).reshape(-1, width(layers))


@dataclass(frozen=True)
class GpuMemory:
    """MiB in use on whole GPUs, by name, at a time of the monotonic clock."""

    nanoseconds: int
    used_mib: Mapping[str, float]


@dataclass(kw_only=True)
class Counts:
    """What sessions count.

    Attributes:
        checked: answers that were compared with the reference.
        wrong: one line a wrong answer, the first ones.
        wrong_answers: all of them.
    """

    checked: int = 0
    wrong_answers: int = 0
    wrong: list[str] = field(default_factory=list)
    reopened: int = 0
    cancelled_steps: int = 0
    rejected_steps: int = 0
    detachments: int = 0
    faulted_rows: int = 0


def added(counts: Iterable[Counts]) -> dict[str, Any]:
    """The fields of `Counts`, summed up."""
    total = Counts()
    for one in counts:
        for counted in fields(Counts):
            name = counted.name
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return vars(total)


@dataclass(kw_only=True)
class Done(Counts):
    """How it ended.

    Attributes:
        paused_seconds: in which a closed loop compared answers or attached anew.
    """

    paused_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """It could not go on."""

    number: int
    reason: str
