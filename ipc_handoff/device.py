"""Device functions of the hand-over: words that another process reads, waits, stamps.

PTX: as instructions of the GPU; otherwise in Triton, for its interpreter. A word is 64 bits and is
named by its address. Who rings puts `tl.debug_barrier()` between its last payload store and
`ring`; who waited puts one between `look` and its first payload load: a word is stored by one
thread and ordered for that thread alone.

A program that looks has one warp: what its first thread saw is what all of them go by. Threads
that looked for themselves could leave one loop for different reasons.
"""

import triton
import triton.language as tl

from ipc_handoff.device_layout import DEVICE_LINE
from ipc_handoff.generations import LAYER_BITS

LINE = tl.constexpr(DEVICE_LINE)
_LAYERS = tl.constexpr(1 << LAYER_BITS)

_LOOK = tl.constexpr(
    """{
    .reg .b32 low, high;
    ld.acquire.sys.global.u64 $0, [$1];
    mov.b64 {low, high}, $0;
    shfl.sync.idx.b32 low, low, 0, 31, -1;
    shfl.sync.idx.b32 high, high, 0, 31, -1;
    mov.b64 $0, {low, high};
    }"""
)
_RING = tl.constexpr(
    """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.u64 [$1], $2;
    mov.b32 $0, 0;
    }"""
)
_TELL = tl.constexpr(
    """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first fence.acq_rel.sys;
    @first st.relaxed.sys.global.u64 [$1], $2;
    mov.b32 $0, 0;
    }"""
)
_TIME = tl.constexpr("mov.u64 $0, %globaltimer;")
_FIRST = tl.constexpr(
    """{
    .reg .b32 low, high;
    mov.b64 {low, high}, $1;
    shfl.sync.idx.b32 low, low, 0, 31, -1;
    shfl.sync.idx.b32 high, high, 0, 31, -1;
    mov.b64 $0, {low, high};
    }"""
)


@triton.jit
def look(address, PTX: tl.constexpr):
    """The word there, as its writer last released it to the whole system."""
    if PTX:
        return tl.inline_asm_elementwise(
            _LOOK, "=l,l,~{memory}", [address], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.atomic_add(word(address), 0, sem="acquire", scope="sys")


@triton.jit
def _release(address, value, ASSEMBLY: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        tl.inline_asm_elementwise(
            ASSEMBLY, "=r,l,l,~{memory}", [address, value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_xchg(word(address), value, sem="release", scope="sys")


@triton.jit
def ring(address, value, PTX: tl.constexpr):
    """Release a word to the whole system: what came before the last barrier is seen before it."""
    _release(address, value, _RING, PTX)


@triton.jit
def tell(address, value, PTX: tl.constexpr):
    """As `ring`, for a word that the host alone reads: no kernel starts or goes on by it."""
    _release(address, value, _TELL, PTX)


@triton.jit
def word(address):
    """A pointer to the word at an address."""
    return tl.cast(address, tl.pointer_type(tl.int64))


@triton.jit
def bytes_at(address):
    """A pointer to bytes."""
    return tl.cast(address, tl.pointer_type(tl.uint8))


@triton.jit
def int32_at(address):
    """A pointer to 32-bit numbers."""
    return tl.cast(address, tl.pointer_type(tl.int32))


@triton.jit
def line(base, number):
    """The address of a region's word number `number`."""
    return base + tl.cast(number, tl.int64) * LINE


@triton.jit
def generation(step, ordinal):
    """Of a slot that holds this step's layer, see `Generation.word`; 1 less: being written."""
    return (tl.cast(step, tl.int64) * _LAYERS + ordinal) * 2 + 1


@triton.jit
def held(address, asked):
    """The generation there now; 0, and nothing is read, if nobody has asked."""
    return tl.load(word(address), mask=asked, other=0, volatile=True)


@triton.jit
def nanoseconds(PTX: tl.constexpr):
    """The GPU's clock, one for all processes on it; 0 in the interpreter, where no time passes."""
    if PTX:
        return tl.inline_asm_elementwise(_TIME, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def first_thread(value, PTX: tl.constexpr):
    """What a warp's first thread has of a 64-bit number."""
    if PTX:
        return tl.inline_asm_elementwise(
            _FIRST, "=l,l", [value], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return value


@triton.jit
def stamps_of(stamps, step, stamped, stride):
    """The address of a step's stamps, in a ring of `stamped` steps at address `stamps`."""
    return stamps + (step % stamped) * stride


@triton.jit
def clear_stamps(block, step, cells, BLOCK: tl.constexpr):
    """Take the stamps of an older step. Their generation is the step, and 0 meanwhile."""
    tl.store(word(block), 0)
    tl.debug_barrier()
    for first in range(0, cells, BLOCK):
        cell = first + tl.arange(0, BLOCK)
        tl.store(word(block) + 1 + cell, tl.zeros((BLOCK,), tl.int64), mask=cell < cells)
    tl.debug_barrier()
    tl.store(word(block), step)


@triton.jit
def stamp(block, cell, time):
    """Write a time into a step's stamps. cell: layer * stages + stage."""
    tl.store(word(block) + 1 + cell, time)


@triton.jit
def last_to_arrive(arrived, programs):
    """Whether this program is the last to come here; it sees what all of them stored before.

    arrived: int32, 0, and so again afterwards.
    """
    tl.debug_barrier()  # all threads' stores, before one thread tells
    is_last = programs == 1
    if programs > 1:
        others = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        is_last = others == programs - 1
        if is_last:
            tl.store(arrived, 0)
    return is_last
