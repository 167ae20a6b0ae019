"""How the hand-over's kernels are launched."""

import math
from functools import lru_cache

import torch

INDEX_BYTES = 4

_HOPPER = 9
_VECTOR_BYTES = 16


@lru_cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (and wait for that itself)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER


def together(*places: int) -> int:
    """Bytes that a thread can move at a time, where all rows begin at sums of these."""
    return math.gcd(_VECTOR_BYTES, *places)
