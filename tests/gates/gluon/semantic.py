"""Triton's own rules for Gluon's types and layouts, over the numpy builder."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language._core import (
    distributed_type,
    shared_memory_descriptor,
)
from triton.experimental.gluon.language._semantic import GluonSemantic

from tests.gates.gluon import assembly, layouts
from tests.gates.gluon.builder import Builder, Handle, numpy_type

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "_elementwise_max": np.fmax.reduce,
    "_elementwise_min": np.fmin.reduce,
    "_sum_combine": np.sum,
}
_SCANS: dict[str, Callable[..., Any]] = {"_sum_combine": np.cumsum}


class Semantic(GluonSemantic):  # type: ignore[type-arg]
    """What GluonSemantic leaves to the compiler (layouts of results) is asked of it."""

    builder: Builder

    def _result(self, data: Any, like: Any, shape: Sequence[int], layout: Any) -> Any:
        handle = Handle(data, like.type.scalar)
        return self.tensor(handle, distributed_type(like.type.scalar, list(shape), layout))

    def expand_dims(self, input: Any, axis: int) -> Any:
        shape, layout = tuple(input.shape), input.type.layout
        axis += (len(shape) + 1) * (axis < 0)
        data = np.expand_dims(input.handle.data, axis)
        return self._result(data, input, data.shape, layouts.expanded(shape, layout, axis))

    def reshape(self, input: Any, dst_shape: Sequence[int], can_reorder: bool) -> Any:
        shape, into = tuple(input.shape), tuple(int(size) for size in dst_shape)
        if can_reorder:
            raise NotImplementedError("reshape with can_reorder")
        data = input.handle.data.reshape(into)
        return self._result(data, input, into, layouts.reshaped(shape, input.type.layout, into))

    def permute(self, input: Any, dims: Sequence[int]) -> Any:
        order = tuple(int(dim) for dim in dims)
        layout = layouts.permuted(tuple(input.shape), input.type.layout, order)
        data = np.transpose(input.handle.data, order)
        return self._result(data, input, data.shape, layout)

    def join(self, a: Any, b: Any) -> Any:
        a, b = self.broadcast_impl_value(a, b)
        layout = layouts.joined(tuple(a.shape), a.type.layout)
        data = np.stack([a.handle.data, b.handle.data], axis=-1)
        return self._result(data, a, data.shape, layout)

    def split(self, a: Any) -> tuple[Any, Any]:
        layout = layouts.split(tuple(a.shape), a.type.layout)
        first, second = a.handle.data[..., 0], a.handle.data[..., 1]
        shape = first.shape
        return self._result(first, a, shape, layout), self._result(second, a, shape, layout)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        shape = tuple(value.shape)
        if assert_trivial and not layouts.trivial(shape, value.type.layout, layout):
            raise TypeError(f"from {value.type.layout} to {layout}: not trivial")
        return self._result(value.handle.data, value, shape, layout)

    def reduce(self, input: Any, axis: int | None, combine: Any, keep_dims: bool = False) -> Any:
        name = combine.__name__
        if name not in _REDUCTIONS or axis is None or keep_dims:
            raise NotImplementedError(f"a reduction with {name} over axis {axis}")
        data = _REDUCTIONS[name](input.handle.data, axis=axis).astype(input.handle.data.dtype)
        if input.handle.data.ndim == 1:
            return self.tensor(Handle(data.reshape(1), input.type.scalar), input.type.scalar)
        return self._result(data, input, data.shape, gl.SliceLayout(axis, input.type.layout))

    def scan(self, input: Any, axis: int, combine: Any, reverse: bool = False) -> Any:
        name = combine.__name__
        if name not in _SCANS or reverse:
            raise NotImplementedError(f"a scan with {name}")
        data = _SCANS[name](input.handle.data, axis=axis).astype(input.handle.data.dtype)
        return self._result(data, input, data.shape, input.type.layout)

    def multiple_of(self, x: Any, value: int) -> Any:
        """What is promised to the compiler is checked."""
        if (x.handle.data.astype(np.int64) % value).any():
            raise AssertionError(f"multiple_of(..., {value}) of what is none")
        return x

    def memdesc_trans(self, mem_desc: Any, order: Sequence[int]) -> Any:
        shape = [mem_desc.shape[i] for i in order]
        layout = layouts.permuted_memory(
            mem_desc.dtype, tuple(mem_desc.shape), mem_desc.layout, tuple(order)
        )
        handle = self.builder.create_memdesc_trans(mem_desc.handle, order)
        return shared_memory_descriptor(handle, mem_desc.dtype, shape, layout, shape)

    def memdesc_reinterpret(
        self, mem_desc: Any, dtype: Any, shape: Sequence[int], layout: Any
    ) -> Any:
        before = _placed(mem_desc.dtype, mem_desc.shape, mem_desc.layout)
        after = _placed(dtype, shape, layout)
        if before != after:
            raise TypeError(f"{mem_desc} lies otherwise than {layout} of {dtype}{list(shape)}")
        return super().memdesc_reinterpret(mem_desc, dtype, shape, layout)

    def inline_asm(
        self, asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        first = args[0]
        shape, layout = tuple(first.shape), first.type.layout
        kinds = tuple(dtype) if isinstance(dtype, tuple) else (dtype,)
        places = layouts.held(shape, layout)
        inputs: list[Any] = []
        for arg in args:
            if (tuple(arg.shape), arg.type.layout) != (shape, layout):
                raise TypeError(f"inline assembly on {first.type} and {arg.type}")
            inputs += assembly.registers(arg.handle.data.ravel()[places], pack)
        given = [one.strip() for one in constraints.split(",")]
        if len(given) != len(kinds) + len(inputs):
            raise TypeError(f"{constraints!r} for {len(kinds)} results, {len(inputs)} registers")
        results = []
        for kind, words in zip(kinds, assembly.run(asm, inputs, len(kinds)), strict=True):
            data = np.empty(math.prod(shape), numpy_type(kind))
            data[places.ravel()] = assembly.elements(words, numpy_type(kind), pack)
            handle = Handle(data.reshape(shape), kind)
            results.append(self.tensor(handle, distributed_type(kind, list(shape), layout)))
        return tuple(results) if isinstance(dtype, tuple) else results[0]

    def warp_specialize(
        self, functions_and_args: Sequence[Any], worker_num_warps: Sequence[int],
        worker_num_regs: Sequence[int], generator: Any,
    ) -> None:  # fmt: skip
        counts = [self.builder.warps.count, *worker_num_warps]
        self.builder.partitions(
            [
                (function.__name__, count, _call(function, arguments))
                for (function, arguments), count in zip(functions_and_args, counts, strict=True)
            ]
        )


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], None]:
    def run() -> None:
        with np.errstate(all="ignore"):
            if function(*arguments) is not None:
                raise NotImplementedError("a partition that returns something")

    return run


def _placed(kind: Any, shape: Sequence[int], layout: Any) -> tuple[int, ...]:
    """What of a layout decides at which byte an element lies, as far as the kernels' ones differ.

    Bytes of a swizzled row, and, where there is a swizzle, bytes of a whole row; else nothing.
    """
    size = kind.primitive_bitwidth // 8
    if isinstance(layout, gl.NVMMASharedLayout):
        if layout.transposed or layout.fp4_padded:
            raise NotImplementedError(f"reinterpreting {layout}")
        swizzle = layout.swizzle_byte_width
        return (swizzle, shape[-1] * size) if swizzle else (0,)
    if layout.vec == layout.per_phase == layout.max_phase == 1:
        return (0,)
    raise NotImplementedError(f"reinterpreting {layout}")
