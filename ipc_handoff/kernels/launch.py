"""How the hand-over's kernels are launched."""

from functools import lru_cache

import torch

_HOPPER = 9


@lru_cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (and wait for that itself)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER
