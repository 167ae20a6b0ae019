"""How the hand-over's kernels are launched."""

from functools import lru_cache
from typing import Any

import torch

_HOPPER = 9
_ALL_SHARED = 100


@lru_cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (and wait for that itself)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER


@lru_cache
def _share_multiprocessor(function: int) -> None:
    from cuda.bindings import driver  # only where there is a GPU

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (error,) = driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, _ALL_SHARED)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuFuncSetAttribute: {error.name}")


def share_multiprocessor(compiled: Any) -> None:
    """Let a waiting kernel share its multiprocessor with kernels that need much shared memory.

    A multiprocessor divides its memory between cache and shared memory when its first program
    comes, and keeps to that while one is there. One that waits, and asks for nothing, would shut
    out all that need more: programs that are meant to run all at once would take turns.
    """
    if isinstance(function := getattr(compiled, "function", None), int):
        _share_multiprocessor(function)
