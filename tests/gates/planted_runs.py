"""Interpreted kernels, sound ones and faulty ones, to show that the gate tells them apart."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.gates.kernels import Run


@triton.jit
def copies(x, out, size, N: tl.constexpr, BEYOND: tl.constexpr, TOGETHER: tl.constexpr):
    program = tl.program_id(0)
    place = program * N + tl.arange(0, N)
    values = tl.load(x + place + BEYOND, mask=place < size)
    tl.store(out + (place % N if TOGETHER else place), values, mask=place < size)


def _copy(beyond: int = 0, together: bool = False) -> None:
    x, out = torch.arange(40.0), torch.zeros(40)
    copies[(3,)](x, out, 40, N=16, BEYOND=beyond, TOGETHER=together)
    assert torch.equal(x, out)


@triton.jit
def passes_on(line, out, TO: tl.constexpr, N: tl.constexpr, BARRIER: tl.constexpr):
    """Each program stores its part of a line and loads the part of the TO-th after it."""
    program = tl.program_id(0)
    place = tl.arange(0, N)
    tl.store(line + (program + 1) * N + place, place)
    if BARRIER:
        tl.debug_barrier()
    values = tl.load(line + (program + 1 + TO) * N + place)
    tl.store(out + program * N + place, values)


def _pass_on(to: int, barrier: bool = True) -> None:
    line = torch.zeros(5 * 16, dtype=torch.int32)
    passes_on[(3,)](line, torch.zeros_like(line), TO=to, N=16, BARRIER=barrier)


@triton.jit
def sums_when_last(
    x, parts, counter, out, N: tl.constexpr, BARRIER: tl.constexpr, SEM: tl.constexpr,
    SCOPE: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """The last program to arrive sums what all of them stored, and resets the counter."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    place = tl.arange(0, N)
    tl.store(parts + program * N + place, tl.load(x + program * N + place) * 2)
    if BARRIER:
        tl.debug_barrier()
    arrived = tl.atomic_add(counter + (program if OTHER else 0), 1, sem=SEM, scope=SCOPE)
    if arrived == programs - 1 or OTHER:
        total = tl.zeros((N,), tl.float32)
        for other in range(programs):
            total += tl.load(parts + other * N + place)
        tl.store(out + program * N + place, total)
        tl.store(counter, 0)


def _sum_when_last(
    barrier: bool = True, sem: str = "acq_rel", scope: str = "gpu", other: bool = False
) -> None:
    x, counter, out = torch.arange(48.0), torch.zeros(3, dtype=torch.int32), torch.zeros(48)
    sums_when_last[(3,)](
        x, torch.zeros(48), counter, out, N=16, BARRIER=barrier, SEM=sem, SCOPE=scope, OTHER=other
    )
    assert torch.equal(out[32:], 2 * x.view(3, 16).sum(0))
    assert not counter.any()


@triton.jit
def adds_one(x, out, N: tl.constexpr, WAIT: tl.constexpr):
    place = tl.arange(0, N)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    tl.store(out + place, tl.load(x + place) + 1)


def _add_one_twice(wait: bool = True) -> None:
    """The second kernel is launched early."""
    x, once, twice = torch.zeros(16), torch.zeros(16), torch.zeros(16)
    adds_one[(1,)](x, once, N=16, WAIT=False)
    adds_one[(1,)](once, twice, N=16, WAIT=wait, launch_pdl=True)
    assert (twice == 2).all()


@triton.jit
def multiplies(x, y, out, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


@triton.jit
def adds(x, y, out, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + place, (tl.load(x + place) + tl.load(y + place)).to(tl.float32))


@triton.jit
def multiplies_and_adds(x, y, out, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    values = tl.load(x + place)
    tl.store(out + place, tl.fma(values, tl.load(y + place), values).to(tl.float32))


@triton.jit
def converts(x, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


def _bf16_pair() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn((16, 16), generator=source).to(torch.bfloat16) for _ in range(2))
    return x, y


def _bf16_dot(spoil: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    (x, y), out = _bf16_pair(), torch.zeros((16, 16))
    multiplies[(1,)](x, y, out, N=16)
    torch.testing.assert_close(spoil(out), x.float() @ y.float())


def _bf16_sum() -> None:
    (x, y), out = _bf16_pair(), torch.zeros((16, 16))
    adds[(1,)](x, y, out, N=16)
    assert torch.equal(out, (x + y).float())


def _bf16_fma() -> None:
    (x, y), out = _bf16_pair(), torch.zeros((16, 16))
    multiplies_and_adds[(1,)](x, y, out, N=16)


def _convert(values: Tensor, dtype: torch.dtype) -> None:
    out = torch.zeros(len(values), dtype=dtype)
    converts[(1,)](values, out, N=len(values))
    if dtype == torch.float8_e4m3fn:
        values = values.clamp(-448, 448)  # as the hardware: torch's own conversion gives NaN
    assert torch.equal(out.float(), values.to(dtype).float())


_HALFWAY = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1.0, -1 - 3 * 2.0**-8])
_TOO_LARGE = torch.tensor([500.0, -1e6, 448.0, torch.inf])

NUMBERS: dict[str, Callable[[], None]] = {
    "bf16 dot": _bf16_dot,
    "bf16 sum": _bf16_sum,
    "bf16 rounding": partial(_convert, _HALFWAY, torch.bfloat16),
    "e4m3 overflow": partial(_convert, _TOO_LARGE, torch.float8_e4m3fn),
}
"""What Triton's interpreter gets wrong without the repair."""

SOUND: dict[str, Callable[[], None]] = NUMBERS | {
    "copy": _copy,
    "own part after a barrier": partial(_pass_on, to=0),
    "last program sums": _sum_when_last,
    "early launch": _add_one_twice,
    "last program sums, system scope": partial(_sum_when_last, scope="sys"),
}

FAULTY: dict[str, Callable[[], None]] = {
    "beyond the end": partial(_copy, beyond=1),
    "stores of two programs": partial(_copy, together=True),
    "load of an earlier program's store": partial(_pass_on, to=-1),
    "store after a later program's load": partial(_pass_on, to=1),
    "load of own store without a barrier": partial(_pass_on, to=0, barrier=False),
    "no barrier before the release": partial(_sum_when_last, barrier=False),
    "relaxed counter": partial(_sum_when_last, sem="relaxed"),
    "release without acquire": partial(_sum_when_last, sem="release"),
    "acquire without release": partial(_sum_when_last, sem="acquire"),
    "counter of one program's scope": partial(_sum_when_last, scope="cta"),
    "counter of each program": partial(_sum_when_last, other=True),
    "early launch without a wait": partial(_add_one_twice, wait=False),
    "fma of bf16": _bf16_fma,
    "integers to bf16": partial(_convert, torch.arange(4), torch.bfloat16),
    "wrong answer": partial(_bf16_dot, lambda out: out * 1.01),
}

RUNS = [Run(name, check) for name, check in (SOUND | FAULTY).items()]
UNREPAIRED = [Run(name, check) for name, check in NUMBERS.items()]
