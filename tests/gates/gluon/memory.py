"""A program's shared memory: bytes, and for each byte the accesses that later ones must follow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gates.gluon.warps import READS, Access, Warps
from tests.gates.ordering import Race

POISON = 0xFF
"""Of bytes that were never written: NaN in every floating-point type."""

_State = frozenset[Access]
"""The last write of a byte, and the reads since."""


class OutOfBounds(IndexError):
    """An index that lies outside a piece of shared memory."""


class Allocation:
    """The bytes that one `allocate_shared_memory` asked for."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.bytes = np.full(size, POISON, np.uint8)
        self.states = np.zeros(size, np.int32)


@dataclass(frozen=True)
class View:
    """A tensor in shared memory: what a descriptor stands for."""

    allocation: Allocation
    kind: Any
    """Triton's element type."""
    item: Any
    """numpy's."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, like the offset."""

    def index(self, at: int) -> "View":
        if not 0 <= at < self.shape[0]:
            raise OutOfBounds(f"index {at} of shared memory [{self.shape[0]}, ...]")
        offset = self.offset + at * self.strides[0]
        return View(self.allocation, self.kind, self.item, offset, self.shape[1:], self.strides[1:])

    def slice(self, offsets: Sequence[int], shape: Sequence[int]) -> "View":
        for begin, length, whole in zip(offsets, shape, self.shape, strict=True):
            if begin < 0 or begin + length > whole:
                raise OutOfBounds(f"slice {begin}..{begin + length} of shared memory [{whole}]")
        offset = self.offset + sum(
            begin * stride for begin, stride in zip(offsets, self.strides, strict=True)
        )
        return View(self.allocation, self.kind, self.item, offset, tuple(shape), self.strides)

    def permute(self, order: Sequence[int]) -> "View":
        shape, strides = zip(*((self.shape[i], self.strides[i]) for i in order), strict=True)
        return View(self.allocation, self.kind, self.item, self.offset, shape, strides)

    def reinterpret(self, kind: Any, item: Any, shape: Sequence[int]) -> "View":
        strides = dense(shape, item.itemsize)
        size = math.prod(shape) * item.itemsize
        if self.strides != dense(self.shape, self.item.itemsize):
            raise OutOfBounds("only whole pieces of shared memory can be read as another type")
        if size > math.prod(self.shape) * self.item.itemsize:
            raise OutOfBounds(f"{size} bytes are more than the memory that is read as another type")
        return View(self.allocation, kind, item, self.offset, tuple(shape), strides)

    def read(self) -> Any:
        return self._strided(self.allocation.bytes, self.item).copy()

    def write(self, values: Any) -> None:
        self._strided(self.allocation.bytes, self.item)[...] = values

    def states(self) -> Any:
        """[..., bytes of an element], to be written."""
        whole = self.allocation.states
        return np.lib.stride_tricks.as_strided(
            whole[self.offset :], (*self.shape, self.item.itemsize),
            tuple(stride * whole.itemsize for stride in (*self.strides, 1)),
        )  # fmt: skip

    def _strided(self, flat: Any, item: Any) -> Any:
        data = flat[self.offset :]
        data = data[: len(data) // item.itemsize * item.itemsize].view(item)
        return np.lib.stride_tricks.as_strided(data, self.shape, self.strides)

    def __str__(self) -> str:
        return f"shared memory no. {self.allocation.number} ({self.kind}{list(self.shape)})"


def dense(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Strides in bytes of a tensor without gaps."""
    strides = [size]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides[: len(shape)])


class SharedMemory:
    """The allocations of one program, and whether what meets in them is ordered."""

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._states: list[_State] = [frozenset()]
        self._numbers: dict[_State, int] = {frozenset(): 0}

    def allocate(self, kind: Any, item: Any, shape: Sequence[int]) -> View:
        size = math.prod(shape) * item.itemsize
        allocation = Allocation(len(self._allocations), size)
        self._allocations.append(allocation)
        return View(allocation, kind, item, 0, tuple(shape), dense(shape, item.itemsize))

    def access(self, view: View, access: Access, warps: Warps) -> None:
        """Take note of an access.

        Raises:
            Race: nothing orders it after an earlier one.
        """
        states = view.states()
        first = int(states.flat[0])
        if (states == first).all():
            states[...] = self._after(first, access, view, warps)
            return
        distinct, which = np.unique(states, return_inverse=True)
        after = [self._after(number, access, view, warps) for number in distinct.tolist()]
        states[...] = np.array(after, np.int32)[which].reshape(states.shape)

    def _after(self, number: int, access: Access, view: View, warps: Warps) -> int:
        state = self._states[number]
        if not state and access.kind in READS:
            raise Race(f"{access.kind} of {view} by {warps.name}: nothing was ever written there")
        for earlier in state:
            both_read = earlier.kind in READS and access.kind in READS
            if not both_read and not warps.knows(earlier, access):
                raise Race(
                    f"{access.kind} of {view} by {warps.name}: nothing orders it after the "
                    f"{earlier.kind} of {earlier.agent}"
                )
        if access.kind in READS:
            own = {a for a in state if (a.kind, a.agent) == (access.kind, access.agent)}
            state = state - own | {access}
        else:
            state = frozenset([access])
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
        return self._numbers[state]
