"""Which function runs an operation: a lazy table of implementations for each.

Implementations are named by import path, so that a machine without (say) Triton never imports
it. Adding one is one more keyword at the operation's `Operation(...)`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from indexer_service.kernels.checks import fault

Implementation = Callable[..., Any]

AUTO = "auto"
_PREFERRED = {"cuda": "triton"}
"""What "auto" means for a type of device where an operation has it; else the reference."""


class Operation:
    """The implementations of one operation, by name.

    >>> paged = Operation("mqa_logits.paged", reference="package.module:function")
    >>> paged.implementation("auto", torch.device("cpu"))  # imports package.module
    """

    def __init__(self, name: str, **implementations: str) -> None:
        self.name = name
        self._paths = implementations

    def implementation(self, impl: str, device: torch.device) -> Implementation:
        """The function that `impl` names on `device`.

        Raises:
            ValueError: `impl` is neither "auto" nor one of this operation's implementations.
        """
        chosen = impl
        if impl == AUTO:
            chosen = _PREFERRED.get(device.type, "reference")
            chosen = chosen if chosen in self._paths else "reference"
        if chosen not in self._paths:
            choices = ", ".join([AUTO, *self._paths])
            raise fault("impl", f"{impl!r} does not implement {self.name}", f"one of: {choices}")
        return _load(self._paths[chosen])


@cache
def _load(path: str) -> Implementation:
    module, function = path.split(":")
    loaded: Implementation = getattr(import_module(module), function)
    return loaded
