"""Every load, store and atomic of an interpreted kernel is checked. Importing this installs it.

Lanes must lie within the storage of one of the kernel's arguments (or of `also_allowed`), two
lanes of a store must not meet, and what programs and threads do at one address must be ordered
(`ordering.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

from tests.gates.ordering import ATOMIC, LOAD, STORE, Ordering, Program

_builder = interpreter.InterpreterBuilder
_masked_load = _builder.create_masked_load
_masked_store = _builder.create_masked_store
_atomic_rmw = _builder.create_atomic_rmw
_atomic_cas = _builder.create_atomic_cas
_run_grid = interpreter.GridExecutor.__call__


class StrayAccess(AssertionError):
    """A kernel touched what it was not given, or one store twice the same address."""


class _Watch:
    """Which addresses a launch may use, and the accesses so far."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted(
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in (tensor.untyped_storage() for tensor in tensors)
        )
        self.begin = np.array([begin for begin, _ in spans], np.uint64)
        self.end = np.array([end for _, end in spans], np.uint64)
        self.ordering = Ordering()

    def lanes(self, pointers: Any, mask: Any, kind: str) -> tuple[Any, int]:
        """Addresses of the active lanes, and the bytes of each."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        active = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        addresses = pointers.data[active].astype(np.uint64).ravel()
        if addresses.size:
            span = np.searchsorted(self.begin, addresses, side="right") - 1
            inside = (span >= 0) & (addresses + np.uint64(size) <= self.end[np.maximum(span, 0)])
            if not inside.all():
                raise StrayAccess(f"{kind}: {int((~inside).sum())} lanes out of bounds")
        return addresses, size

    def access(self, program: Program, pointers: Any, mask: Any, kind: str) -> None:
        addresses, size = self.lanes(pointers, mask, kind)
        if kind == STORE and len(np.unique(addresses)) != addresses.size:
            raise StrayAccess(f"store: program {program} stores twice to one address")
        if addresses.size:
            self.ordering.access(kind, program, addresses, size)

    def atomic(self, program: Program, pointers: Any, mask: Any, sem: Any, scope: Any) -> None:
        single = not pointers.data.shape or pointers.data.size == 1
        if not single:
            self.access(program, pointers, mask, ATOMIC)
            return
        addresses, size = self.lanes(pointers, mask, ATOMIC)
        if addresses.size:
            shared = scope.name != "CTA"
            self.ordering.single_atomic(
                program, int(addresses[0]), size,
                acquire=shared and sem.name in ("ACQUIRE", "ACQUIRE_RELEASE"),
                release=shared and sem.name in ("RELEASE", "ACQUIRE_RELEASE"),
            )  # fmt: skip


class _Everywhere:
    data = np.array(True)


_watch: _Watch | None = None

also_allowed: list[Tensor] = []
"""Memory that a kernel may touch though it is no argument: it is given addresses in it."""

launched: set[str] = set()
"""module:function of every kernel that was interpreted."""


def _load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    if _watch is not None:
        _watch.access(tuple(self.grid_idx), pointers, mask, LOAD)
    return _masked_load(self, pointers, mask, *rest)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    if _watch is not None:
        _watch.access(tuple(self.grid_idx), pointers, mask, STORE)
    return _masked_store(self, pointers, value, mask, *rest)


def _rmw(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    if _watch is not None:
        _watch.atomic(tuple(self.grid_idx), pointers, mask, sem, scope)
    return _atomic_rmw(self, kind, pointers, value, mask, sem, scope)


def _cas(self: Any, pointers: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
    if _watch is not None:
        _watch.atomic(tuple(self.grid_idx), pointers, _Everywhere, sem, scope)
    return _atomic_cas(self, pointers, compare, value, sem, scope)


def _barrier(self: Any) -> None:
    if _watch is not None:
        _watch.ordering.barrier(tuple(self.grid_idx))


@contextmanager
def watching(kernel: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Watch a launch of module:function, which may touch the tensors' storage."""
    global _watch
    launched.add(kernel)
    _watch = _Watch([*tensors, *also_allowed])
    try:
        yield
    finally:
        _watch = None


def _launch(self: Any, *arguments: Any, **named: Any) -> Any:
    everything = (*arguments, *named.values())
    tensors = [argument for argument in everything if isinstance(argument, Tensor)]
    with watching(f"{self.fn.__module__}:{self.fn.__name__}", tensors):
        return _run_grid(self, *arguments, **named)


_builder.create_masked_load = _load
_builder.create_masked_store = _store
_builder.create_atomic_rmw = _rmw
_builder.create_atomic_cas = _cas
_builder.create_barrier = _barrier
interpreter.GridExecutor.__call__ = _launch
