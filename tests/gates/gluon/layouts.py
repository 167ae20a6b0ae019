"""Layouts of what is reshaped, reduced and joined: asked of Triton's compiler, without a GPU.

It builds the operation on a tensor that is never computed, and is asked for the result's layout.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon.language import DistributedLinearLayout, float32
from triton.experimental.gluon.language._core import distributed_type, shared_memory_descriptor_type

_THREADS = 32


class _Compiler:
    """Triton's builder of Gluon operations, in a module that is thrown away."""

    def __init__(self) -> None:
        backend = make_backend(GPUTarget("cuda", 90, _THREADS))
        self.context = ir.context()
        ir.load_dialects(self.context)
        backend.load_dialects(self.context)
        self.builder = builder = gluon_ir.GluonOpBuilder(self.context)
        self.module = builder.create_module()
        self.module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
        for name, value in (("num-warps", 4), ("num-ctas", 1), ("threads-per-warp", _THREADS)):
            self.module.set_attr(f"ttg.{name}", builder.get_int32_attr(value))
        kind = builder.get_function_ty([], [])
        function = builder.get_or_insert_function(self.module, "layouts", kind, "public", False)
        self.module.push_back(function)
        builder.set_insertion_point_to_start(function.add_entry_block())

    def tensor(self, shape: tuple[int, ...], layout: Any) -> Any:
        kind = distributed_type(float32, list(shape), layout)
        return self.builder.create_poison(kind.to_ir(self.builder))


@lru_cache
def _compiler() -> _Compiler:
    return _Compiler()


def _inferred(make: Callable[..., Any]) -> Callable[..., Any]:
    """From a function that makes an operation to one that says its result's layout."""

    @lru_cache
    def infer(*arguments: Any) -> Any:
        compiler = _compiler()
        result = make(compiler, *arguments)
        return compiler.builder.get_gluon_layout_from_tensor(result)

    return infer


@_inferred
def expanded(compiler: _Compiler, shape: tuple[int, ...], layout: Any, axis: int) -> Any:
    return compiler.builder.create_expand_dims(compiler.tensor(shape, layout), axis)


@_inferred
def reshaped(
    compiler: _Compiler, shape: tuple[int, ...], layout: Any, into: tuple[int, ...]
) -> Any:
    return compiler.builder.create_reshape(compiler.tensor(shape, layout), list(into), False)


@_inferred
def permuted(
    compiler: _Compiler, shape: tuple[int, ...], layout: Any, order: tuple[int, ...]
) -> Any:
    return compiler.builder.create_trans(compiler.tensor(shape, layout), list(order))


@_inferred
def joined(compiler: _Compiler, shape: tuple[int, ...], layout: Any) -> Any:
    part = compiler.tensor(shape, layout)
    return compiler.builder.create_join(part, part)


@_inferred
def split(compiler: _Compiler, shape: tuple[int, ...], layout: Any) -> Any:
    return compiler.builder.create_split(compiler.tensor(shape, layout))[0]


@lru_cache
def trivial(shape: tuple[int, ...], layout: Any, into: Any) -> bool:
    """Whether a conversion moves nothing between threads."""
    compiler = _compiler()
    kind = distributed_type(float32, list(shape), into).to_ir(compiler.builder)
    tensor = compiler.tensor(shape, layout)
    return bool(compiler.builder.is_convert_layout_trivial(kind, tensor))


@lru_cache
def permuted_memory(kind: Any, shape: tuple[int, ...], layout: Any, order: tuple[int, ...]) -> Any:
    """The layout of a piece of shared memory whose dimensions change places."""
    builder = _compiler().builder
    memory = shared_memory_descriptor_type(kind, list(shape), layout, list(shape))
    piece = builder.create_local_alloc(memory.to_ir(builder))
    return builder.get_gluon_layout_from_memdesc(builder.create_memdesc_trans(piece, list(order)))


@lru_cache
def held(shape: tuple[int, ...], layout: Any) -> Any:
    """Flat places of the elements that each thread holds, in the order of its registers.

    int [threads, registers].
    """
    if not isinstance(layout, DistributedLinearLayout):
        builder = _compiler().builder
        layout = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    strides = np.cumprod([1, *reversed(shape[1:])])[::-1]

    def places(bases: list[list[int]]) -> Any:
        at = np.zeros(1, np.int64)
        for basis in bases:
            at = np.concatenate([at, at + int(np.dot(basis, strides))])
        return at

    threads = places([*layout.lane_bases, *layout.warp_bases])
    return threads[:, None] + places(layout.reg_bases)[None, :]
