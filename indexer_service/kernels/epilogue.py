"""What a caller has done by the last program of a kernel, instead of by a kernel of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Epilogue:
    """Attributes:
    function: a `@triton.jit` function; the kernel says how it calls it.
    arguments: its last ones. Triton specialises them by their values: keep to addresses, and to
        numbers that are the same in every call.
    alone: launches a kernel that does the same, for who has none that could.
    """

    function: Any
    arguments: tuple[Any, ...]
    alone: Callable[[], None]
