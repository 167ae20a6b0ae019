"""Inputs of the indexer's benchmark, random, in the shapes of DeepSeek-V3.2 and GLM-5."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import environ

import torch
from torch import Tensor

from indexer_service.kernels.architecture import FORCE_ARCH
from indexer_service.kernels.lengths import row_lengths

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, DIM = 64, 128
KEY_BYTES = DIM + 4

SEED = torch.Generator(DEVICE).manual_seed(0)
"""Not torch's own generator, which a graph capture that failed would leave unusable."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=SEED, device=DEVICE, dtype=dtype)


def powers_of_two(*shape: int) -> Tensor:
    """fp32 scales as `k_cache.insert` makes them of keys between 1 and 4."""
    exponents = torch.randint(-8, -6, shape, generator=SEED, device=DEVICE)
    return torch.exp2(exponents.to(torch.float32))


def permutation(count: int) -> Tensor:
    """int64 [count]."""
    return torch.randperm(count, generator=SEED, device=DEVICE)


def head_weights(rows: int, heads: int) -> Tensor:
    """fp32 [rows, heads], q's scale and the two square roots folded in, as a model's are.

    Scores are then within fp16's range, as a model's are: beyond it vLLM's cooperative and
    persistent top-k chose wrongly.
    """
    return normal(rows, heads) * (2.0**-7 / (DIM * heads) ** 0.5)


@contextmanager
def form(arch: str | None) -> Iterator[None]:
    """Our kernels in the form of this architecture; None: of this GPU."""
    before = environ.pop(FORCE_ARCH, None)
    if arch:
        environ[FORCE_ARCH] = arch
    try:
        yield
    finally:
        environ.pop(FORCE_ARCH, None)
        if before is not None:
            environ[FORCE_ARCH] = before


def codes(*shape: int) -> Tensor:
    """e4m3 bytes as a model makes them: roughly normal, of every sign, none NaN."""
    values = normal(*shape, dtype=torch.float16) * 64
    return values.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def pages_of_keys(pages: int) -> Tensor:
    """A K cache: uint8 [pages, PAGE, DIM + 4], scales powers of two."""
    cache = torch.empty((pages, PAGE * KEY_BYTES), device=DEVICE, dtype=torch.uint8)
    step = 4096
    for first in range(0, pages, step):
        part = cache[first : first + step]
        part[:, : PAGE * DIM] = codes(len(part), PAGE * DIM)
        part[:, PAGE * DIM :] = powers_of_two(len(part), PAGE).view(torch.uint8)
    return cache.view(pages, PAGE, KEY_BYTES)


@dataclass
class Pool:
    """Pages of many layers' caches in one tensor, handed out in random order, again and again.

    A page comes back after all others were used: with a pool of several times the L2 cache no
    call finds its keys there, as in a model, where the other layers' come in between.
    """

    pages: int
    k_cache: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.k_cache = pages_of_keys(self.pages)
        self._order = permutation(self.pages).to(torch.int32)
        self._next = 0

    def fill(self, tables: Tensor) -> None:
        """Write the next pages into int32 [.., n]."""
        count = tables.numel()
        places = torch.arange(self._next, self._next + count, device=DEVICE) % self.pages
        tables.copy_(self._order[places].view(tables.shape))
        self._next = (self._next + count) % self.pages


@dataclass
class Decode:
    """One decode step's arguments of `calls` layers; `refresh` gives every layer other pages.

    Attributes:
        q: uint8 [B, next_n, H, DIM]; weights: fp32 [B*next_n, H]; seq_lens: int32 [B], all
            `context`. row_lengths: int32 [B, next_n], what that says of the rows.
        tables: int32 [calls, B, n]: a table has room for `max_context` tokens.
    """

    heads: int
    batch: int
    context: int
    max_context: int
    calls: int
    pool: Pool
    next_n: int = 1

    def __post_init__(self) -> None:
        self.rows = self.batch * self.next_n
        self.q = codes(self.batch, self.next_n, self.heads, DIM)
        self.weights = head_weights(self.rows, self.heads)
        self.seq_lens = torch.full((self.batch,), self.context, dtype=torch.int32, device=DEVICE)
        self.row_lengths = row_lengths(self.seq_lens, self.next_n).contiguous()
        used, room = -(-self.context // PAGE), -(-self.max_context // PAGE)
        shape = (self.calls, self.batch, room)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
        self._used = torch.empty((self.calls, self.batch, used), dtype=torch.int32, device=DEVICE)
        self.refresh()
        self._first = self.tables[0].clone()

    @property
    def k_cache(self) -> Tensor:
        return self.pool.k_cache

    def refresh(self) -> None:
        self.pool.fill(self._used)
        self.tables[..., : self._used.shape[2]] = self._used

    def rewind(self) -> None:
        """Give the first layer the pages that it began with."""
        self.tables[0] = self._first

    def arguments(self, call: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As `mqa_logits.paged` and `indexer.select_paged` take them."""
        return self.q, self.k_cache, self.weights, self.seq_lens, self.tables[call]


@dataclass
class Prefill:
    """The last `rows` tokens of a request of `keys` tokens: row r sees all up to itself."""

    heads: int
    rows: int
    keys: int

    def __post_init__(self) -> None:
        self.q = codes(self.rows, self.heads, DIM)
        self.k = codes(self.keys, DIM)
        self.k_scale = powers_of_two(self.keys)
        self.weights = head_weights(self.rows, self.heads)
        self.row_start = torch.zeros(self.rows, dtype=torch.int32, device=DEVICE)
        first = self.keys - self.rows + 1
        self.row_end = torch.arange(first, self.keys + 1, dtype=torch.int32, device=DEVICE)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the dot products that are asked for."""
        return 2 * int(self.row_end.sum(dtype=torch.int64)) * self.heads * DIM

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As `mqa_logits.ragged` and `indexer.select_ragged` take them."""
        return self.q, self.k, self.k_scale, self.weights, self.row_start, self.row_end


Call = Callable[[int], object]
"""The i-th of several captured calls."""
