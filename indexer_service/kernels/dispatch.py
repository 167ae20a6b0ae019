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
_PREFERRED = {"cpu": "reference"}
"""What "auto" means for a type of device; the reference runs on all others too."""


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
        chosen = _PREFERRED.get(device.type, "reference") if impl == AUTO else impl
        if chosen not in self._paths:
            choices = ", ".join([AUTO, *self._paths])
            raise fault("impl", f"{impl!r} does not implement {self.name}", f"one of: {choices}")
        return _load(self._paths[chosen])


@cache
def _load(path: str) -> Implementation:
    module, function = path.split(":")
    loaded: Implementation = getattr(import_module(module), function)
    return loaded
