"""Which GPU's kernels run. Needs no GPU and no Triton."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from indexer_service.kernels.checks import fault

FORCE_ARCH = "DSA_INDEXER_FORCE_ARCH"
"""Environment variable: with 80 in it, the kernels of SM80 run anywhere."""

NATIVE_FP8 = 89
"""The first architecture with e4m3 conversions and dot products."""

HOPPER = 90
"""The first architecture with programmatic dependent launch."""


def architecture(device: torch.device) -> int:
    """10 * major + minor of the device's compute capability, or what FORCE_ARCH says.

    A device that is no GPU (Triton's interpreter) counts as the first with native e4m3.

    Raises:
        ValueError: FORCE_ARCH is not a number such as 80.
    """
    forced = os.environ.get(FORCE_ARCH)
    if forced:
        if not forced.isdecimal() or int(forced) < 80:
            raise fault(FORCE_ARCH, f"{forced!r} is no architecture", "80, 86, 89, 90, ...")
        return int(forced)
    if device.type != "cuda":
        return NATIVE_FP8
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def native_fp8(arch: int) -> bool:
    """Whether the architecture multiplies e4m3 values itself."""
    return arch >= NATIVE_FP8


_left = 0


def leave_processors(count: int) -> None:
    """In this process, from now on: size kernels for so many multiprocessors fewer.

    For a process beside which another one's kernel waits on the same GPU. Programs that are meant
    to run all at once would otherwise leave one of them for the end. Selected bits stay the same.
    """
    global _left
    _left = count


def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU that kernels are sized for, one without a GPU."""
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count - _left)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: launched from another, a kernel would go to a wrong stream."""
    if device.type == "cuda" and device.index is not None:
        return torch.cuda.device(device)
    return nullcontext()
