"""Kernels with a fault each, to show that the gates see it."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.gates.kernels import Build, Run


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
def gathers_too_much(x, out, N: tl.constexpr):
    rows = tl.arange(0, N)
    total = tl.zeros((N, N), tl.float32)
    for step in tl.range(0, 8, num_stages=5):
        block = tl.load(x + step * N * N + rows[:, None] * N + rows[None, :])
        total += tl.dot(block, tl.trans(block))
    tl.store(out + rows[:, None] * N + rows[None, :], total)


@triton.jit
def copies(x, out, size, N: tl.constexpr, BEYOND: tl.constexpr, TOGETHER: tl.constexpr):
    program = tl.program_id(0)
    place = program * N + tl.arange(0, N)
    values = tl.load(x + place + BEYOND, mask=place < size)
    tl.store(out + (place % N if TOGETHER else place), values, mask=place < size)


@triton.jit
def multiplies(x, y, out, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(x + place), tl.load(y + place))
    tl.store(out + place, (product.to(tl.bfloat16) + tl.load(x + place)).to(tl.float32))


def _copy(beyond: int = 0, together: bool = False) -> None:
    x, out = torch.arange(40.0), torch.zeros(40)
    copies[(3,)](x, out, 40, N=16, BEYOND=beyond, TOGETHER=together)
    assert torch.equal(x, out)


def _bf16(spoil: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn((16, 16), generator=source).to(torch.bfloat16) for _ in range(2))
    out = torch.zeros((16, 16))
    multiplies[(1,)](x, y, out, N=16)
    exact = (x.float() @ y.float()).to(torch.bfloat16) + x
    assert torch.equal(spoil(out), exact.float())


_HERE = "tests.gates.planted"
_POINTERS = dict(x="*fp32", out="*fp32")

BUILDS = {
    "refused": Build(
        "fp8 store", f"{_HERE}:stores_fp8", dict(x="*bf16", out="*fp8e4nv"), dict(N=128)
    ),
    "spills": Build(
        "spill", f"{_HERE}:keeps_everything", _POINTERS, dict(N=32768), dict(num_warps=4)
    ),
    "shared": Build(
        "shared memory", f"{_HERE}:gathers_too_much", dict(x="*bf16", out="*fp32"),
        dict(N=128), dict(num_warps=8),
    ),
}  # fmt: skip

RUNS = [
    Run("sound copy", _copy),
    Run("sound bf16", _bf16),
    Run("out of bounds", lambda: _copy(beyond=1)),
    Run("programs meet", lambda: _copy(together=True)),
    Run("wrong answer", lambda: _bf16(lambda out: out * 1.01)),
]
