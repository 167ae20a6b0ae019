"""Triton's interpreter made right for bf16 and e4m3.

Triton 3.6 interprets bf16 as if it were 16-bit integers in dots, arithmetic and casts, and lets
e4m3 wrap where the hardware saturates; numbers come out that are wrong without a word. Import
this after TRITON_INTERPRET=1 was set and before a kernel runs: importing repairs. What is not
repaired (reductions, functions and conversions from integers in these types) is refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
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
_unary_op = _builder.unary_op
_ternary_op = _builder.ternary_op
_cast = _builder.cast_impl
_fma = _builder.create_fma
_check_reduced = interpreter.ReduceScanOpInterface.check_tensor


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
        _refuse(a.dtype, b.dtype)
        return _binary_op(self, a, b, operation)
    result = np.asarray(operation(_as_float32(a), _as_float32(b)))
    if result.dtype == np.bool_:
        return Handle(result, tl.int1)
    rounded = _converted(result.astype(np.float32), tl.float32, tl.bfloat16, None)
    return Handle(rounded, tl.bfloat16)


def _refuse(*types: Any) -> None:
    for kind in types:
        if kind.scalar in _SMALL:
            raise NotImplementedError(f"{kind.scalar} is not interpreted here: convert to fp32")


def _unary(self: Any, a: Any, operation: Callable[..., Any]) -> Any:
    _refuse(a.dtype)
    return _unary_op(self, a, operation)


def _ternary(self: Any, a: Any, b: Any, c: Any, operation: Callable[..., Any]) -> Any:
    if operation is not np.where:  # which only moves bits
        _refuse(a.dtype, b.dtype, c.dtype)
    return _ternary_op(self, a, b, c, operation)


def _multiply_add(self: Any, a: Any, b: Any, c: Any) -> Any:
    _refuse(a.dtype, b.dtype, c.dtype)
    return _fma(self, a, b, c)


def _cast_number(self: Any, a: Any, target: Any) -> Any:
    if {a.dtype.scalar, target.scalar} != {tl.bfloat16, tl.float32}:
        _refuse(a.dtype, target)
    return _cast(self, a, target)


def _check_reduction(self: Any, inputs: Any) -> None:
    _refuse(*(value.dtype for value in inputs))
    _check_reduced(self, inputs)


def _repair() -> None:
    interpreter._convert_float = _converted
    interpreter.ReduceScanOpInterface.check_tensor = _check_reduction
    _builder.create_dot = _dot
    _builder.binary_op = _arithmetic
    _builder.unary_op = _unary
    _builder.ternary_op = _ternary
    _builder.create_fma = _multiply_add
    _builder.cast_impl = _cast_number


_repair()
