"""The GPU's clock beside the host's: stamps of kernels and of processes in one order."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ipc_handoff.device import nanoseconds
from ipc_handoff.stamps import StepTimes

_LOOKS = 8
_FRESH_SECONDS = 1.0


@triton.jit
def clock_kernel(out, PTX: tl.constexpr):
    """Write the time. out: int64 [1]. One program."""
    tl.store(out, nanoseconds(PTX))


@dataclass(frozen=True)
class ClockOffset:
    """Attributes:
    offset: CLOCK_MONOTONIC minus the GPU's clock, ns.
    error: how wrong it may be, ns, when it was looked at.
    """

    offset: int
    error: int


def clock_offset(device: torch.device) -> ClockOffset:
    """Look at both clocks, on the current stream; waits for it. The closest look counts."""
    is_cuda = device.type == "cuda"
    out = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
    done = torch.cuda.Event() if is_cuda else None
    looks = []
    for _ in range(_LOOKS):
        before = time.monotonic_ns()
        clock_kernel[(1,)](out, PTX=is_cuda, num_warps=1)
        if done is not None:
            done.record()
            done.synchronize()
        after = time.monotonic_ns()
        looks.append(((after - before) // 2, (before + after) // 2 - int(out[0])))
    error, offset = min(looks)
    return ClockOffset(offset, error)


class HostsClock:
    """Tells a GPU's times by CLOCK_MONOTONIC.

    The two drift apart, by tens of microseconds a second, and are looked at anew each second.

    Args:
        look: at both; waits, some tenths of a millisecond.
    """

    def __init__(self, look: Callable[[], ClockOffset]) -> None:
        self._look = look
        self._clock, self._looked = ClockOffset(0, 0), -_FRESH_SECONDS

    def look(self) -> None:
        """Now, which the first times would otherwise wait for."""
        self._clock, self._looked = self._look(), time.monotonic()

    def of(self, times: StepTimes) -> StepTimes:
        """A step's times, 0: not reached."""
        if time.monotonic() - self._looked >= _FRESH_SECONDS:
            self.look()
        offset = self._clock.offset
        moved = ([at + offset if at else 0 for at in stamps] for stamps in times)
        return StepTimes(moved, self._clock.error)
