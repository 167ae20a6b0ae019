"""The GPU's clock beside the host's: stamps of kernels and of processes in one order."""

import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ipc_handoff.device import nanoseconds
from ipc_handoff.stamps import StepTimes

_LOOKS = 8


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


def on_the_hosts_clock(times: StepTimes, clock: ClockOffset) -> StepTimes:
    """A GPU's times of a step (0: not reached) as those of CLOCK_MONOTONIC."""
    moved = ([at + clock.offset if at else 0 for at in stamps] for stamps in times)
    return StepTimes(moved, clock.error)
