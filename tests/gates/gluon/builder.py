"""The operations of Gluon's builder over numpy, and on one program's shared memory."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.gates import interpreter as repaired
from tests.gates.gluon.mbarriers import MBarrier
from tests.gates.gluon.memory import SharedMemory, View
from tests.gates.gluon.turns import Turns
from tests.gates.gluon.warps import LOAD, STORE, TENSOR_COPY, Access, Warps, join
from tests.gates.ordering import Race

Handle = interpreter.TensorHandle
numpy_type = interpreter._get_np_dtype

_ALIGNED = 128
"""Bytes that the copy engine's destinations are aligned to."""


class Product(Handle):  # type: ignore[misc]
    """An accumulator of matrix products that may still be running."""

    number = 0


class Builder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """State of the program that runs, and what its operations do."""

    def start(self, name: str, warps: int) -> None:
        """A new program begins."""
        self.memory = SharedMemory()
        self.turns = Turns()
        self.barriers: dict[tuple[int, int], MBarrier] = {}
        self.warps = Warps(name, warps)
        self.everybody = [self.warps]

    def end(self) -> None:
        """Nothing may still write to shared memory that another program will get."""
        known: dict[Any, int] = {}
        for warps in self.everybody:
            warps.barrier()
            join(known, warps.seen)
        for warps in self.everybody:
            if known.get(warps.copying, 0) < warps.copies:
                raise Race(f"{warps.name} ends before its copies have arrived")
            if known.get(warps.multiplying, 0) < warps.products:
                raise Race(f"{warps.name} ends before its matrix products")
        for barrier in self.barriers.values():
            if known.get(barrier.name, 0) < barrier.copies:
                raise Race(f"the program ends before the copies that {barrier.name} counts")

    # Types are the language's own: nothing is translated.

    def create_broadcast(self, handle: Any, kind: Any) -> Any:
        return Handle(np.broadcast_to(handle.data, kind.shape), handle.dtype.scalar)

    def create_make_range(self, kind: Any, start: int, stop: int) -> Any:
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)  # noqa: E731
    create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)  # noqa: E731

    def create_barrier(self) -> None:
        self.warps.barrier()
        super().create_barrier()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name} is no operation that runs without a GPU")

    # Shared memory

    def create_local_alloc(self, kind: Any, value: Any = None) -> View:
        view = self.memory.allocate(kind.element_ty, numpy_type(kind.element_ty), kind.shape)
        if value is not None:
            self.create_local_store(view, value)
        return view

    def create_local_load(self, kind: Any, view: View) -> Any:
        self.memory.access(view, self.warps.access(LOAD), self.warps)
        return Handle(view.read(), view.kind)

    def create_local_store(self, view: View, value: Any) -> None:
        self.memory.access(view, self.warps.access(STORE), self.warps)
        view.write(value.data)

    def create_memdesc_index(self, kind: Any, view: View, index: Any) -> View:
        return view.index(int(index.data.item()))

    def create_memdesc_subslice(self, kind: Any, view: View, offsets: Sequence[int]) -> View:
        return view.slice(offsets, kind.shape)

    def create_memdesc_trans(self, view: View, order: Sequence[int]) -> View:
        return view.permute(order)

    def create_memdesc_reinterpret(self, kind: Any, view: View) -> View:
        return view.reinterpret(kind.element_ty, numpy_type(kind.element_ty), kind.shape)

    def create_fence_async_shared(self, cluster: bool) -> None:
        self.warps.fence()

    # cp.async

    def create_async_copy_global_to_local(
        self, view: View, pointers: Any, mask: Any, other: Any, *rest: Any
    ) -> None:
        present = mask if isinstance(mask, Handle) else Handle(np.array(True), tl.int1)
        present = Handle(np.broadcast_to(present.data, pointers.data.shape), tl.int1)
        values = self.create_masked_load(pointers, present, None, None, None, False)
        self.memory.access(view, self.warps.start_copy(), self.warps)
        view.write(values.data)

    def create_async_commit_group(self) -> None:
        self.warps.commit_copies()

    def create_async_wait_group(self, outstanding: int) -> None:
        self.warps.wait_for_copies(outstanding)

    def create_async_copy_mbarrier_arrive(self, view: View, increment: bool) -> None:
        if increment:
            raise NotImplementedError("async_copy.mbarrier_arrive that increments the count")
        warps = self.warps
        self._barrier(view).arrive(32 * warps.count, {warps.copying: warps.copies}, {})

    # mbarrier

    def create_mbarrier_init(self, view: View, count: int) -> None:
        name = f"barrier {view.offset // 8} of shared memory no. {view.allocation.number}"
        made = {self.warps.name: self.warps.access(STORE).time}
        self.barriers[view.allocation.number, view.offset] = MBarrier(name, count, made)

    def create_mbarrier_expect(self, view: View, size: int, predicate: Any) -> None:
        if predicate.data.item():
            self._barrier(view).expect(size)

    def create_mbarrier_arrive(self, view: View, count: int, predicate: Any) -> None:
        if predicate.data.item():
            self._barrier(view).arrive(count, dict(self.warps.seen), dict(self.warps.fenced))

    def create_mbarrier_wait(self, view: View, phase: Any, predicate: Any, deps: Any) -> None:
        if not predicate.data.item():
            return
        barrier, parity = self._barrier(view), int(phase.data.item())
        self.turns.wait(lambda: f"{barrier}, waited for {parity}", lambda: barrier.passed(parity))
        barrier.acquire(self.warps)

    def _barrier(self, view: View) -> MBarrier:
        barrier = self.barriers.get((view.allocation.number, view.offset))
        if barrier is None:
            raise Race(f"{view} is used as a barrier before it is made one")
        barrier.check_use(self.warps)
        return barrier

    # The copy engine

    def create_async_tma_copy_global_to_local(
        self, source: Any, at: Sequence[Any], barrier: View, view: View, predicate: Any
    ) -> None:
        if not predicate.data.item():
            return
        if view.offset % _ALIGNED:
            raise Race(f"{view}: byte {view.offset} is not aligned to {_ALIGNED}")
        if list(source.block) != list(view.shape):
            raise Race(f"a box {list(source.block)} is copied to {view}")
        counted = self._barrier(barrier)
        values = source.load(self, [int(coordinate.data.item()) for coordinate in at])
        counted.copies += 1
        access = Access(TENSOR_COPY, counted.name, counted.copies)
        self.memory.access(view, access, self.warps)
        view.write(values)
        counted.bring(values.nbytes, {counted.name: counted.copies})

    # Matrix products

    def create_warpgroup_mma(
        self, a: Any, b: Any, acc: Any, use_acc: Any, precision: Any, imprecise: Any, later: bool
    ) -> Any:
        access = self.warps.start_product()
        left, right = (self._operand(operand, access) for operand in (a, b))
        # In float64, so that an element's bits do not depend on the shape, as on the GPU.
        result = np.matmul(left, right)
        if use_acc.data.item():
            result = result + acc.data
        product = Product(result.astype(acc.data.dtype), acc.dtype.scalar)
        product.number = access.time
        if not later:
            self.warps.wait_for_products(0)
        return product

    def _operand(self, operand: Any, access: Access) -> Any:
        if isinstance(operand, View):
            self.memory.access(operand, access, self.warps)
            operand = Handle(operand.read(), operand.kind)
        return repaired._as_float32(operand).astype(np.float64)

    def create_warpgroup_mma_wait(self, handles: Sequence[Any], outstanding: int) -> list[Any]:
        self.warps.wait_for_products(outstanding)
        for handle in handles:
            if isinstance(handle, Product) and not self.warps.has_product(handle.number):
                raise Race(f"warpgroup_mma_wait({outstanding}) does not wait for what it returns")
        return list(handles)

    # Partitions

    def partitions(self, work: Sequence[tuple[str, int, Callable[[], None]]]) -> None:
        """Run functions at once, each by warps of its own; the first by those there are."""
        outer = self.warps
        outer.barrier()
        groups = []
        for number, (name, count, _) in enumerate(work):
            warps = outer if number == 0 else Warps(f"{outer.name}, {name}", count)
            if number:
                warps.seen, warps.fenced = dict(outer.seen), dict(outer.fenced)
                self.everybody.append(warps)
            groups.append(warps)

        def choose(number: int) -> None:
            self.warps = groups[number]

        self.turns.run([(name, function) for name, _, function in work], choose)
        self.warps = outer
        for warps in groups:
            warps.barrier()
        for warps in groups[1:]:
            join(outer.seen, warps.seen)
            join(outer.fenced, warps.fenced)
