"""Every load, store and atomic of an interpreted kernel is checked. Importing this installs it.

Lanes must lie within the storage of one of the kernel's arguments (or of `also_allowed`), two
lanes of a store must not meet, and what programs and threads do at one address must be ordered
(`ordering.py`).

A kernel that is launched early (`launch_pdl`) runs after the one before it here; before its
`gdc_wait` it must not touch what that one stored to.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
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
    """Which addresses a launch may use, and the accesses so far.

    Args:
        unfinished: first addresses of the storages that a launch which may still run stores to.
    """

    def __init__(self, tensors: Sequence[Tensor], unfinished: set[int]) -> None:
        spans = sorted(
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in (tensor.untyped_storage() for tensor in tensors)
        )
        self.begin = np.array([begin for begin, _ in spans], np.uint64)
        self.end = np.array([end for _, end in spans], np.uint64)
        self.ordering = Ordering()
        self.unfinished = unfinished
        self.waited: set[Program] = set()
        self.stored: set[int] = set()

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
            self._touch(span, kind)
        return addresses, size

    def _touch(self, spans: Any, kind: str) -> None:
        if kind == LOAD and not self.unfinished:
            return
        touched = set(self.begin[np.unique(spans)].tolist())
        if kind != LOAD:
            self.stored |= touched
        if touched & self.unfinished and _program() not in self.waited:
            raise StrayAccess(f"{kind}: before gdc_wait, of what the launch before stores to")

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


def _program() -> Program:
    return tuple(interpreter.interpreter_builder.grid_idx)


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


def _wait() -> None:
    if _watch is not None:
        _watch.waited.add(_program())


def _let_start() -> None:
    """The next launch runs when this one is done."""


def _barrier(self: Any) -> None:
    if _watch is not None:
        _watch.ordering.barrier(tuple(self.grid_idx))


_stored: set[int] = set()
"""First addresses of the storages that the last launch stored to."""


@contextmanager
def watching(kernel: str, tensors: Sequence[Tensor], early: bool) -> Iterator[None]:
    """Watch a launch of module:function, which may touch the tensors' storage.

    early: it may begin before the launch before it has ended.
    """
    global _stored, _watch
    launched.add(kernel)
    _watch = _Watch([*tensors, *also_allowed], _stored if early else set())
    try:
        yield
    finally:
        _stored = _watch.stored
        _watch = None


def _launch(self: Any, *arguments: Any, **named: Any) -> Any:
    everything = (*arguments, *named.values())
    tensors = [argument for argument in everything if isinstance(argument, Tensor)]
    early = named.get("launch_pdl", False)
    with watching(f"{self.fn.__module__}:{self.fn.__name__}", tensors, early):
        return _run_grid(self, *arguments, **named)


_builder.create_masked_load = _load
_builder.create_masked_store = _store
_builder.create_atomic_rmw = _rmw
_builder.create_atomic_cas = _cas
_builder.create_barrier = _barrier
interpreter.GridExecutor.__call__ = _launch
# (Triton makes two modules of one file.)
for _module in (tl.extra.cuda, sys.modules["triton.language.extra.cuda"]):
    _module.gdc_wait = _wait
    _module.gdc_launch_dependents = _let_start
