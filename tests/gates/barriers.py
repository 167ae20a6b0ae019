"""Of a compiled kernel that rings or looks: whether the whole block's accesses keep the order.

`st.release` and `ld.acquire` order one thread's accesses. What other threads of the block stored
before the release, or load after the acquire, needs a barrier of the block in between. Read from
the text, in its order. Stores of the first thread alone, which rings, may follow the barrier: a
predicate's threads are computed as far as they depend on the thread's number only.

And who looks is one warp, which goes by what its first thread saw.

Where the next kernel may start early: one that rings or looks lets it start behind its own wait for
the kernel before (settled kernels behind it go by what that one wrote), and one that looks, when it
has looked: what comes next is large, and would hold the room that the other side needs.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RELEASE = re.compile(r"\bst\.release\.sys\b|\batom\.global\.\w+\.(acq_rel|release)\b")
_ACQUIRE = re.compile(r"\bld\.acquire\.sys\b")
_BARRIER = re.compile(r"\bbar(rier)?\.(cta\.)?sync\b")
_STORE = re.compile(r"(?:@(%p\d+)\s+)?st\.global\b")
_LOAD = re.compile(r"\bld\.global\b")
_NEXT_STARTS, _WAITS = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
_WARP = 32
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_INSTRUCTION = re.compile(r"([a-z0-9.]+)\s+(%\w+),\s*([^;]+);")

_NUMBERS: dict[str, Callable[..., Any]] = {
    "mov.u32": lambda a: a, "mov.b32": lambda a: a, "and.b32": operator.and_,
    "or.b32": operator.or_, "xor.b32": operator.xor, "shl.b32": operator.lshift,
    "shr.u32": operator.rshift, "add.s32": operator.add,
    "bfe.u32": lambda a, begin, length: (a >> begin) & ((1 << length) - 1),
    "setp.eq.b32": operator.eq, "setp.eq.s32": operator.eq, "setp.ne.b32": operator.ne,
    "setp.ne.s32": operator.ne, "setp.lt.u32": operator.lt, "setp.lt.s32": operator.lt,
    "setp.gt.u32": operator.gt, "setp.gt.s32": operator.gt,
}  # fmt: skip


class _Threads:
    """Registers that depend on nothing but the thread's number, and who may be in a predicate."""

    def __init__(self, ptx: str) -> None:
        found = _THREADS.search(ptx)
        self.count = int(found[1]) if found else 1024
        self._known: dict[str, NDArray[Any]] = {"%tid.x": np.arange(self.count)}
        self._everybody = np.ones(self.count, bool)

    def run(self, line: str) -> None:
        """Take note of an instruction."""
        if not (found := _INSTRUCTION.match(line)):
            return
        operation, to, operands = found[1], found[2], [text.strip() for text in found[3].split(",")]
        self._known.pop(to, None)
        if operation == "and.pred":
            # Of what is not known anybody may be in it.
            self._known[to] = self._may_be_in(operands[0]) & self._may_be_in(operands[1])
        elif operation in _NUMBERS:
            values = [self._value(operand) for operand in operands]
            if all(value is not None for value in values):
                result = np.asarray(_NUMBERS[operation](*values))
                self._known[to] = np.broadcast_to(result, self._everybody.shape)

    def is_first_alone(self, predicate: str | None) -> bool:
        """Whether no thread but the first one can be in a predicate."""
        return predicate is not None and not self._may_be_in(predicate)[1:].any()

    def _may_be_in(self, predicate: str) -> NDArray[Any]:
        return self._known.get(predicate, self._everybody).astype(bool)

    def _value(self, operand: str) -> Any:
        return int(operand) if operand.lstrip("-").isdecimal() else self._known.get(operand)


def unordered(ptx: str) -> list[str]:
    """What is wrong, one line each; nothing for a kernel that neither rings nor looks."""
    wrong: list[str] = []
    if "st.release.sys" not in ptx and not _ACQUIRE.search(ptx):
        return wrong
    wrong += _starts_early(ptx)
    threads = _Threads(ptx)
    if _ACQUIRE.search(ptx) and threads.count > _WARP:
        wrong.append(f"{threads.count} threads look, and could leave for different reasons")
    stored: str | None = None
    looked = False
    for line in (text.strip() for text in ptx.splitlines()):
        threads.run(line)
        if _BARRIER.search(line):
            stored, looked = None, False
        elif _ACQUIRE.search(line):
            looked = True
        elif _RELEASE.search(line):
            if stored:
                wrong.append(f"no barrier between a store of all threads and the release: {stored}")
        elif found := _STORE.search(line):
            if not threads.is_first_alone(found[1]):
                stored = line
        elif _LOAD.search(line) and looked:
            wrong.append(f"no barrier between the acquire and a load: {line}")
            looked = False
    return wrong


def _starts_early(ptx: str) -> list[str]:
    starts, look = ptx.find(_NEXT_STARTS), _ACQUIRE.search(ptx)
    if starts < 0:
        return []
    wrong = []
    if starts < ptx.find(_WAITS):
        wrong.append("the next kernel may start before this one has waited")
    if look and starts < look.start():
        wrong.append("the next kernel may start before this one has looked")
    return wrong
