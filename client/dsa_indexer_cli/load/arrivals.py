"""When steps shall begin. In an open loop that is settled before the first one runs: a step that
is late because of the one before counts from its own time (no coordinated omission)."""

import random
import time
from collections.abc import Iterator, Sequence

from dsa_indexer_cli.load.workload import Load

_NANOSECONDS = 1_000_000_000


def arrivals(
    load: Load, begin: int, end: int, seed: int, recorded: Sequence[float] = ()
) -> Iterator[int]:
    """Times, in nanoseconds of the monotonic clock; of a closed loop, always the present.

    Args:
        recorded: seconds after `begin`, for the mode of that name.
    """
    if load.mode == "recorded":
        yield from (at for s in recorded if (at := begin + int(s * _NANOSECONDS)) < end)
        return
    if load.mode == "closed":
        while (now := time.monotonic_ns()) < end:
            yield now
        return
    chance = random.Random(seed)
    gap = _NANOSECONDS / load.rate
    # Sessions with equal gaps must not all begin at once.
    due = begin + gap * chance.random()
    while due < end:
        yield int(due)
        due += gap if load.arrivals == "constant" else chance.expovariate(1) * gap
