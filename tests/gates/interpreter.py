"""Triton's interpreter made right for bf16 and e4m3, and watchful of memory.

Triton 3.6 interprets bf16 as if it were 16-bit integers in dots, arithmetic and casts, and lets
e4m3 wrap where the hardware saturates; numbers come out that are wrong without a word. Import
this after TRITON_INTERPRET=1 was set and before a kernel runs: importing repairs.

Every load and store of a kernel is then checked: lanes must lie within the storage of one of its
arguments; two lanes of a store must not meet; and no two programs of a launch may store to one
address, since their order is not defined.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_SMALL = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
_SIGNED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_LARGEST_E4M3 = 448.0

Handle = interpreter.TensorHandle
_builder = interpreter.InterpreterBuilder
_convert_float = interpreter._convert_float
_binary_op = _builder.binary_op
_masked_load = _builder.create_masked_load
_masked_store = _builder.create_masked_store
_masked_atomic = _builder.create_atomic_rmw
_run_grid = interpreter.GridExecutor.__call__


class StrayAccess(AssertionError):
    """A kernel touched what it was not given, or two of its programs one address."""


def _converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source not in _TORCH or target not in _TORCH:
        return _convert_float(values, source, target, rounding)
    bits = np.array(values, copy=True).view(f"uint{source.primitive_bitwidth}")
    numbers = torch.from_numpy(bits).view(_TORCH[source]).to(torch.float64)
    if target == tl.float8e4nv:
        clamped = numbers.clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
        numbers = torch.where(numbers.isnan(), numbers, clamped)
    width = target.primitive_bitwidth
    # float64 -> float32 -> target would round twice for what is not exact in float32; sources
    # are at most float32 in these kernels, so that the first step is exact.
    result = numbers.to(torch.float32 if width < 64 else torch.float64).to(_TORCH[target])
    return result.view(_SIGNED[width]).numpy().view(f"uint{width}")


def _as_float32(handle: Any) -> Any:
    kind = handle.dtype.scalar
    if kind in _SMALL:
        return _converted(handle.data, kind, tl.float32, None).view(np.float32)
    return handle.data


def _dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
    if not a.dtype.scalar.is_floating():
        product = np.matmul(a.data, b.data, dtype=acc.data.dtype)
    else:
        product = np.matmul(_as_float32(a).astype(np.float32), _as_float32(b).astype(np.float32))
    return Handle((product + acc.data).astype(acc.data.dtype), acc.dtype.scalar)


def _arithmetic(self: Any, a: Any, b: Any, operation: Callable[..., Any]) -> Any:
    if a.dtype.scalar != tl.bfloat16 or b.dtype.scalar != tl.bfloat16:
        return _binary_op(self, a, b, operation)
    result = np.asarray(operation(_as_float32(a), _as_float32(b)))
    if result.dtype == np.bool_:
        return Handle(result, tl.int1)
    rounded = _converted(result.astype(np.float32), tl.float32, tl.bfloat16, None)
    return Handle(rounded, tl.bfloat16)


class _Watch:
    """Which addresses exist, and who stored where."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted(
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in (tensor.untyped_storage() for tensor in tensors)
        )
        self.begin = np.array([begin for begin, _ in spans], np.uint64)
        self.end = np.array([end for _, end in spans], np.uint64)
        self.writer: dict[int, tuple[int, ...]] = {}

    def lanes(self, pointers: Any, mask: Any, kind: str) -> Any:
        active = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        addresses = pointers.data[active].astype(np.uint64).ravel()
        if not addresses.size:
            return addresses
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        span = np.searchsorted(self.begin, addresses, side="right") - 1
        inside = (span >= 0) & (addresses + size <= self.end[np.maximum(span, 0)])
        if not inside.all():
            raise StrayAccess(f"{kind}: {int((~inside).sum())} lanes out of bounds")
        return addresses

    def store(self, program: tuple[int, ...], addresses: Any) -> None:
        if len(np.unique(addresses)) != addresses.size:
            raise StrayAccess(f"store: program {program} stores twice to one address")
        for address in addresses.tolist():
            before = self.writer.setdefault(address, program)
            if before != program:
                raise StrayAccess(f"store: programs {before} and {program} meet at one address")


_watch: _Watch | None = None


def _load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
    if _watch is not None:
        _watch.lanes(pointers, mask, "load")
    return _masked_load(self, pointers, mask, other, *rest)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    if _watch is not None:
        _watch.store(tuple(self.grid_idx), _watch.lanes(pointers, mask, "store"))
    return _masked_store(self, pointers, value, mask, *rest)


def _atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    if _watch is not None:
        _watch.lanes(pointers, mask, "atomic")
    return _masked_atomic(self, operation, pointers, value, mask, *rest)


def _launch(self: Any, *arguments: Any, **named: Any) -> Any:
    global _watch
    everything = (*arguments, *named.values())
    _watch = _Watch([argument for argument in everything if isinstance(argument, Tensor)])
    try:
        return _run_grid(self, *arguments, **named)
    finally:
        _watch = None


def _repair() -> None:
    interpreter._convert_float = _converted
    _builder.create_dot = _dot
    _builder.binary_op = _arithmetic
    _builder.create_masked_load = _load
    _builder.create_masked_store = _store
    _builder.create_atomic_rmw = _atomic
    interpreter.GridExecutor.__call__ = _launch


_repair()
