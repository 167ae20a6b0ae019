"""Which GPU's kernels run. Needs no GPU and no Triton."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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


_sizes = threading.local()


@contextmanager
def sized_for(processors: int) -> Iterator[None]:
    """Size this thread's kernels for so many multiprocessors. Selected bits stay the same."""
    before = getattr(_sizes, "processors", None)
    _sizes.processors = processors
    try:
        yield
    finally:
        _sizes.processors = before


def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU that kernels are sized for, one without a GPU."""
    if device.type != "cuda":
        return 1
    asked: int | None = getattr(_sizes, "processors", None)
    if asked is not None:
        return asked
    return torch.cuda.get_device_properties(device).multi_processor_count


def beside_a_wait(device: torch.device) -> int:
    """Multiprocessors to size kernels for, beside a waiting kernel of another process.

    Programs that are meant to run all at once find one fewer than there are: the last of them
    would run alone, at the end.
    """
    return max(1, processors(device) - 1)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: launched from another, a kernel would go to a wrong stream."""
    if device.type == "cuda" and device.index is not None:
        return torch.cuda.device(device)
    return nullcontext()
