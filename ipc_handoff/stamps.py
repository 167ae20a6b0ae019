"""Stage stamps: when each stage of each layer ended, in a ring of steps.

One writer a ring. The service's ring lies in the control block, where the worker can read it
even when the service is dead; the worker's own may lie anywhere. The block of a step begins
with its generation, the step's number: 0 while it is being reset. A reader looks at the
generation before and after it copies; if another step took the block meanwhile, the stamps
are lost, and counted, never shown. Times are nanoseconds of CLOCK_MONOTONIC (one clock for all
processes of a host, and it never steps); 0: not reached.
"""

import time
from collections.abc import Iterable

from ipc_handoff.layout import stamp_block_bytes
from ipc_handoff.words import WORD_BYTES, Words, fence

_SAMPLED_STEPS = 16


def is_sample(step: int) -> bool:
    """Whether a step's times go into metrics: to bring them from a GPU costs a copy."""
    return step % _SAMPLED_STEPS == 0


class StepTimes(list[list[int]]):
    """Times [layers][stages] of a step.

    Attributes:
        clock_error: by how much times of another clock may be wrong, ns; None: of the host's own.
    """

    def __init__(self, times: Iterable[list[int]], clock_error: int | None = None) -> None:
        super().__init__(times)
        self.clock_error = clock_error

    @classmethod
    def of_cells(cls, cells: list[int], stages: int) -> "StepTimes":
        """From a block's times, layer after layer."""
        return cls(cells[i : i + stages] for i in range(0, len(cells), stages))


class StampRing:
    """Args:
    area: shared bytes.
    layers, stages: how many of each.
    """

    def __init__(self, area: memoryview, layers: int, stages: int) -> None:
        size = stamp_block_bytes(layers, stages)
        blocks = [area[offset : offset + size] for offset in range(0, len(area), size)]
        self._generations = [Words(block[:WORD_BYTES]) for block in blocks]
        self._bodies = [block[WORD_BYTES:].cast("Q") for block in blocks]
        self._cells, self._stages = layers * stages, stages
        self._blank = memoryview(bytes(size - WORD_BYTES)).cast("Q")
        self._begun = [0] * len(blocks)  # By this end, if it is the writer's.
        self.lost = 0

    @classmethod
    def private(cls, steps: int, layers: int, stages: int) -> "StampRing":
        """A ring that only this process sees."""
        size = steps * stamp_block_bytes(layers, stages)
        return cls(memoryview(bytearray(size)), layers, stages)

    def begin(self, step: int) -> None:
        """Take the block of `step`; whatever stood there is gone."""
        index = step % len(self._bodies)
        self._begun[index] = step
        self._generations[index].store(0)
        fence()  # A reader that sees anything of this step sees the generation gone.
        self._bodies[index][:] = self._blank
        self._generations[index].store(step)

    def stamp(self, step: int, layer: int, stage: int, at: int | None = None) -> None:
        """Write the time at which `stage` of layer ordinal `layer` ended; now by default.

        Nothing is written once another step took the block.
        """
        index = step % len(self._bodies)
        if self._begun[index] == step:
            cell = layer * self._stages + stage
            self._bodies[index][cell] = time.monotonic_ns() if at is None else at

    def read(self, step: int) -> StepTimes | None:
        """Times [layers][stages] of a step, or None (and counted) if they were overwritten."""
        index = step % len(self._bodies)
        before = self._generations[index].load()
        cells = self._bodies[index][: self._cells].tolist()
        fence()  # The second look comes after the copy.
        if before != step or self._generations[index].load() != step:
            self.lost += 1
            return None
        return StepTimes.of_cells(cells, self._stages)
