"""Launches of Gluon kernels run here. Importing this installs it."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language._core import (
    distributed_type,
    shared_memory_descriptor,
    shared_memory_descriptor_type,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from tests.gates import watch
from tests.gates.gluon.builder import Builder, Handle, numpy_type
from tests.gates.gluon.names import Names
from tests.gates.gluon.semantic import Semantic


class Map:
    """A tensor map: what the copy engine knows of a tensor in global memory."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        self.handle = self
        self.layout = descriptor.layout
        self.block = descriptor.block_shape
        self.dtype = pointer(descriptor.base).dtype.element_ty
        self._base = descriptor.base.data_ptr()
        self._shape, self._strides = tuple(descriptor.shape), tuple(descriptor.strides)
        self._padding = descriptor.padding

    def load(self, builder: Builder, at: Sequence[int]) -> Any:
        """The box at these coordinates; outside the tensor its padding."""
        item = numpy_type(self.dtype)
        places = np.zeros(tuple(self.block), np.int64)
        inside = np.ones(tuple(self.block), bool)
        for axis, (begin, size, whole, stride) in enumerate(
            zip(at, self.block, self._shape, self._strides, strict=True)
        ):
            along = [1] * len(self.block)
            along[axis] = size
            place = (begin + np.arange(size)).reshape(along)
            places = places + place * stride
            inside = inside & (place >= 0) & (place < whole)
        if at[-1] * item.itemsize % 16:
            raise watch.StrayAccess(f"a box begins at {list(at)}: no multiple of 16 bytes")
        addresses = (self._base + places * item.itemsize).astype(np.uint64)
        nothing = np.zeros(tuple(self.block), item)
        if self._padding == "nan":
            nothing[...] = np.nan
        loaded = builder.create_masked_load(
            Handle(addresses, tl.pointer_type(self.dtype)), Handle(inside, tl.int1),
            Handle(nothing, self.dtype), None, None, False,
        )  # fmt: skip
        return loaded.data


def pointer(tensor: Tensor) -> Any:
    kind = tl.str_to_ty(mangle_type(tensor), None)
    return tl.tensor(Handle(np.array([tensor.data_ptr()], np.uint64), kind), kind)


def _argument(value: Any, annotation: Any) -> Any:
    """As a compiled kernel takes it."""
    if annotation is tl.constexpr or value is None:
        return value
    if isinstance(value, Tensor):
        return pointer(value)
    if isinstance(value, TensorDescriptor):
        return Map(value)
    if isinstance(value, float):
        return tl.tensor(Handle(np.array([value], np.float32), tl.float32), tl.float32)
    kind = annotation if isinstance(annotation, tl.dtype) else tl.int32
    return tl.tensor(Handle(np.array([value], numpy_type(kind)), kind), kind)


_NAMES = Names(Semantic(Builder()))

_TYPES = (
    tl.dtype, tl.block_type, tl.pointer_type, distributed_type, shared_memory_descriptor_type,
)  # fmt: skip
_WRITTEN = {
    owner: dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.standard, tl.tensor, *_TYPES)
}
"""The language as Triton has it: its own interpreter leaves changes behind."""


@contextmanager
def _tensors_run_here(semantic: Semantic) -> Iterator[None]:
    """Methods of tensors and descriptors bound to the semantic; types that need no translation."""
    changed: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)
        if before is not value:
            changed.append((owner, name, before))
            setattr(owner, name, value)

    for owner, written in _WRITTEN.items():
        for name in vars(owner).keys() & written.keys():
            put(owner, name, written[name])
    for owner in (tl.tensor, shared_memory_descriptor):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                put(owner, name, _bound(member, semantic))
    put(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    put(tl.tensor, "__bool__", lambda self: self.handle.data.size > 1 or bool(self.handle.data[0]))
    for kind in _TYPES:
        put(kind, "to_ir", _own(kind.to_ir))
    try:
        yield
    finally:
        for owner, name, value in reversed(changed):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _bound(member: Any, semantic: Semantic) -> Any:
    def method(*arguments: Any, **named: Any) -> Any:
        return member(*arguments, **(named | {"_semantic": semantic}))

    return method


def _own(to_ir: Any) -> Any:
    def translated(self: Any, builder: Any) -> Any:
        return self if isinstance(builder, Builder) else to_ir(self, builder)

    return translated


def _launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    signature = inspect.signature(self.fn)
    early = named.get("launch_pdl", False)
    named = {name: value for name, value in named.items() if name in signature.parameters}
    given = signature.bind(*arguments, **named).arguments
    notes = self.fn.__annotations__
    tensors = [
        value.base if isinstance(value, TensorDescriptor) else value
        for value in given.values()
        if isinstance(value, (Tensor, TensorDescriptor))
    ]
    semantic = _NAMES.semantic
    builder = semantic.builder
    with (
        watch.watching(f"{self.fn.__module__}:{self.fn.__name__}", tensors, early),
        _tensors_run_here(semantic),
        np.errstate(all="ignore"),
    ):
        ready = {name: _argument(value, notes.get(name)) for name, value in given.items()}
        sizes = (*grid, 1, 1)[:3]
        for one in (builder, interpreter.interpreter_builder):
            one.set_grid_dim(*sizes)
        for x, y, z in np.ndindex(*sizes):
            for one in (builder, interpreter.interpreter_builder):
                one.set_grid_idx(x, y, z)
            builder.start(f"program {x}", given["num_warps"])
            _NAMES.function(self.fn)(**ready)
            builder.end()


GluonJITFunction.run = _launch
