"""Kernels with a fault each, to show that the compile gate sees it."""

from dataclasses import replace

import triton
import triton.language as tl

from tests.gates.builds_handoff import BUILDS as HANDOFF
from tests.gates.kernels import Build


@triton.jit
def stores_fp8(x, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(x + place).to(tl.float8e4nv))


@triton.jit
def keeps_everything(x, out, N: tl.constexpr):
    """Far more values alive at once than a thread has registers."""
    place = tl.arange(0, N)
    a = tl.load(x + place)
    b = tl.load(x + N + place)
    for _ in range(8):
        c = tl.sum(a * b, 0)
        a = a + b * c
        b = b - a * c
    tl.store(out + place, a + b)


@triton.jit
def takes_a_number(x, out, size, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(x + place, mask=place < size), mask=place < size)


STATIC = tl.constexpr("""{
    .shared .b32 room[11000];
    .reg .b32 at;
    mov.u32 at, room;
    mad.lo.u32 at, $1, 4, at;
    st.shared.b32 [at], $1;
    ld.shared.b32 $0, [at+64];
}""")
"""Shared memory of assembly's own, of which Triton does not know."""


@triton.jit
def gathers_too_much(x, out, N: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr):
    rows = tl.arange(0, N)
    total = tl.zeros((N, N), tl.float32)
    for step in tl.range(0, 8, num_stages=STAGES):
        block = tl.load(x + step * N * N + rows[:, None] * N + rows[None, :])
        total += tl.dot(block, tl.trans(block))
    if ASSEMBLY:
        total += tl.inline_asm_elementwise(
            STATIC, "=r,r,~{memory}", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(out + rows[:, None] * N + rows[None, :], total)


_HERE = "tests.gates.planted"
_POINTERS = dict(x="*fp32", out="*fp32")

BUILDS = {
    "refused": Build(
        "fp8 store", f"{_HERE}:stores_fp8", dict(x="*bf16", out="*fp8e4nv"), dict(N=128)
    ),
    "spills": Build(
        "spill", f"{_HERE}:keeps_everything", _POINTERS, dict(N=32768), dict(num_warps=4)
    ),
    "number": Build(
        "number", f"{_HERE}:takes_a_number", _POINTERS | dict(size="i32"), dict(N=128)
    ),
    "alignment": Build(
        "alignment", f"{_HERE}:takes_a_number", _POINTERS | dict(size="constexpr"),
        dict(N=128, size=100), unaligned=("out",),
    ),
    "shared": Build(
        "shared memory", f"{_HERE}:gathers_too_much", dict(x="*bf16", out="*fp32"),
        dict(N=128, STAGES=5, ASSEMBLY=False), dict(num_warps=8),
    ),
    "static shared": Build(
        "static shared memory", f"{_HERE}:gathers_too_much", dict(x="*bf16", out="*fp32"),
        dict(N=128, STAGES=3, ASSEMBLY=True), dict(num_warps=8),
    ),
}  # fmt: skip
BUILDS |= {build.name: build for build in HANDOFF if 90 in build.architectures}
"""Sound ones, for a tree from whose source the barriers were taken."""

BUILDS["wait of four warps"] = replace(BUILDS["wait"], options=dict(num_warps=4))
