"""Which function runs an operation: a lazy table of implementations for each.

Implementations are named by import path, so that a machine without (say) Triton never imports
it. Adding one is one more keyword at the operation's `Operation(...)`.

An implementation that not every machine or shape has says so: beside `paged` in its module stands
`paged_unsupported`, which takes what the operation's wrapper passes on and returns why not, or
None.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch

from indexer_service.kernels.architecture import on
from indexer_service.kernels.checks import fault

Implementation = Callable[..., Any]

AUTO = "auto"
TRITON = "triton"
REFERENCE = "reference"
PREFERENCE = ("xpu", TRITON, "deepgemm", REFERENCE)
"""What "auto" means: the first of these that the operation has and that supports the call."""

_DEVICES = {"xpu": "xpu", "deepgemm": "cuda", TRITON: "cuda"}
"""The type of device that "auto" takes an implementation for; the others run on any."""


class Operation:
    """The implementations of one operation, by name.

    >>> paged = Operation("mqa_logits.paged", reference="package.module:function")
    >>> paged.implementation("auto", torch.device("cpu"))  # imports package.module
    """

    def __init__(self, name: str, **implementations: str) -> None:
        self.name = name
        self._paths = implementations

    def implementation(self, impl: str, device: torch.device, *arguments: Any) -> Implementation:
        """The function that `impl` names on `device`.

        Args:
            arguments: what the implementations' `_unsupported` checks of this operation take.

        Raises:
            ValueError: `impl` is neither "auto" nor one of this operation's implementations, or
                it does not support the call.
        """
        function = _load(self._paths[self.chosen(impl, device, *arguments)])
        return _on(device, function)

    def chosen(self, impl: str, device: torch.device, *arguments: Any) -> str:
        """The name of the implementation that `implementation` gives, which see."""
        if impl == AUTO:
            return self._preferred(device, arguments)
        if impl not in self._paths:
            choices = ", ".join([AUTO, *self._paths])
            raise fault("impl", f"{impl!r} does not implement {self.name}", f"one of: {choices}")
        why = self._unsupported(impl, arguments)
        if why:
            raise fault("impl", f"{impl!r} does not support this call: {why}", f"give {AUTO!r}")
        return impl

    def _preferred(self, device: torch.device, arguments: tuple[Any, ...]) -> str:
        for name in PREFERENCE:
            here = name in self._paths and _DEVICES.get(name, device.type) == device.type
            if here and not self._unsupported(name, arguments):
                return name
        raise fault(
            "impl", f"{self.name} has none for {device}", f"one of: {', '.join(self._paths)}"
        )

    def _unsupported(self, name: str, arguments: tuple[Any, ...]) -> str | None:
        check = _load_check(self._paths[name])
        return check(*arguments) if check else None


def _on(device: torch.device, function: Implementation) -> Implementation:
    if device.index is None:
        return function

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with on(device):
            return function(*arguments, **named)

    return run


@cache
def _load(path: str) -> Implementation:
    module, function = path.split(":")
    loaded: Implementation = getattr(import_module(module), function)
    return loaded


@cache
def _load_check(path: str) -> Callable[..., str | None] | None:
    module, function = path.split(":")
    check: Callable[..., str | None] | None
    check = getattr(import_module(module), f"{function}_unsupported", None)
    return check
