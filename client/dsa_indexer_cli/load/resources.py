"""What processes and GPUs hold, over time, and whether it grows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dsa_indexer_cli.load.workload import Soak

_MAPPING = "dsa-indexer:"
_LEAST_SAMPLES = 8


@dataclass(frozen=True)
class Sample:
    """One look at a process.

    Attributes:
        seconds: since counting began.
        memory_mib: of its own, without what it shares or maps from files.
        mappings: of shared memory of this project.
    """

    seconds: float
    memory_mib: float
    mappings: int
    descriptors: int
    threads: int


def sample(pid: int, seconds: float) -> Sample | None:
    """A look at a process; None if it cannot be looked at: gone, or another user's."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        with (folder / "maps").open() as maps:
            mappings = sum(_MAPPING in line for line in maps)
        return Sample(
            seconds,
            int(status["RssAnon"].split()[0]) / 1024,
            mappings,
            len(os.listdir(folder / "fd")),
            int(status["Threads"]),
        )
    except (OSError, KeyError):
        return None


@dataclass(frozen=True)
class GpuSample:
    """One look at a whole GPU: what all processes hold there."""

    seconds: float
    gpu_memory_mib: float


_WATCHED = {
    Sample: ("memory_mib", "mappings", "descriptors", "threads"),
    GpuSample: ("gpu_memory_mib",),
}


@dataclass(frozen=True)
class Growth:
    """How much more of one thing a process, or a GPU, held in the last quarter than in the first
    (medians).
    """

    process: str
    what: str
    first: float
    last: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.last - self.first <= self.allowed


def growth(process: str, samples: Sequence[Sample | GpuSample], soak: Soak) -> list[Growth]:
    """Of everything that is watched; [] if there are too few samples to say anything."""
    if len(samples) < _LEAST_SAMPLES:
        return []
    quarter = len(samples) // 4
    return [
        Growth(
            process,
            what,
            median(getattr(entry, what) for entry in samples[:quarter]),
            median(getattr(entry, what) for entry in samples[-quarter:]),
            getattr(soak, what),
        )
        for what in _WATCHED[type(samples[0])]
    ]
