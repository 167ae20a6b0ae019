"""What is interpreted of k_cache: the same bytes as the reference, for every 16-bit value."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from indexer_service.kernels import k_cache
from indexer_service.kernels.k_cache import insertion
from tests.gates.kernels import Run

PAGE, DIM, PAGES = 16, 128, 6
GUARD = 0xEE


def _seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _cache(pages: int, dim: int, shift: int = 0, page: int = PAGE) -> Tensor:
    """Pages with others between them, all full of GUARD; with `shift` they are not aligned."""
    room = torch.full((pages * 2 * page * (dim + 4) + shift,), GUARD, dtype=torch.uint8)
    return room[shift:].view(pages, 2, page, dim + 4)[:, 0]


def _same_bytes(k: Tensor, slots: Tensor, *, shift: int = 0, replica: bool = False) -> None:
    """Triton's bytes equal the reference's, also those between the pages."""
    pages, dim = -(-len(k) // PAGE), k.shape[1]
    caches = []
    for impl in ("triton", "reference"):
        cache = _cache(pages, dim, shift)
        second = _cache(pages, dim, 2 * shift) if replica else None
        k_cache.insert(k, slots, cache, replica=second, impl=impl)
        caches += [cache] if second is None else [cache, second]
    storage = caches[0].untyped_storage().nbytes()
    first, *others = (torch.as_strided(cache, (storage - 2 * shift,), (1,)) for cache in caches)
    for other in others:
        assert torch.equal(first, other), f"{int((first != other).sum())} bytes differ"
    assert bool((first != GUARD).any())


def every_value(dtype: torch.dtype, *, at_scale_one: bool) -> Tensor:
    """Keys [n, DIM] with all 65536 values of a dtype.

    Neighbours share a key, so that most keys have a scale of their own; or each key has 448 and
    nothing larger but infinities, so that every boundary and halfway value of e4m3 occurs as it is.
    """
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    if not at_scale_one:
        return values.view(-1, DIM)
    values = values[~(values.isfinite() & (values.abs() > 448))]
    values = torch.nn.functional.pad(values, (0, -len(values) % (DIM - 1))).view(-1, DIM - 1)
    return torch.cat([values, torch.full((len(values), 1), 448, dtype=dtype)], 1)


def amax_at_the_powers() -> Tensor:
    """bf16 keys whose largest magnitude is next to 448 * 2^n, or next to and below 1e-4."""
    powers = torch.exp2(torch.arange(-40, 118, 3).to(torch.float32))
    amax = (powers[:, None] * torch.tensor([446.0, 448.0, 450.0])).flatten()
    tiny = torch.tensor([0.0, 1e-40, 1e-5, 9.9e-5, 1e-4, 1.01e-4])
    amax = torch.cat([amax, tiny]).to(torch.bfloat16)
    rest = torch.randn((len(amax), DIM - 1), generator=_seed(1)).clamp(-1, 1).to(torch.bfloat16)
    return torch.cat([rest * amax[:, None], amax[:, None]], 1)


def _all_values(dtype: torch.dtype, at_scale_one: bool) -> None:
    k = every_value(dtype, at_scale_one=at_scale_one)
    with patch.object(insertion, "_FEW_KEYS", 0):  # larger and fewer programs
        _same_bytes(k, torch.randperm(len(k), generator=_seed(2)))


def _few(dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Keys, and fewer slots, some of them outside."""
    slots = torch.randperm(48, generator=_seed(3))[:41]
    slots[::5] = torch.tensor([-1, 48, 2**40, -(2**62), 50, -7, 2**62, 48, -1])
    return torch.randn((45, dim), generator=_seed(4)).to(torch.bfloat16), slots


def _strided_keys() -> None:
    k, slots = _few()
    spread = torch.zeros((len(slots), 3), dtype=torch.int64)
    spread[:, 1] = slots
    for wide in (torch.zeros((45, 203)), torch.zeros((45, 256))):
        wide = wide.to(torch.bfloat16)
        wide[:, 1:129] = k
        _same_bytes(wide[:, 1:129], spread[:, 1])
    _same_bytes(k.T.contiguous().T, slots)


def _gather(lengths: list[int], dim: int = DIM, shift: int = 0) -> None:
    cache = _cache(PAGES, dim, shift)
    cache.copy_(torch.randint(0, 256, cache.shape, generator=_seed(5), dtype=torch.uint8))
    columns = -(-max(lengths) // PAGE) + 1
    table = torch.randint(-2, PAGES + 2, (len(lengths), 2 * columns), generator=_seed(6))
    table = table.to(torch.int32)[:, ::2]
    seq_lens = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(2)[::2]
    (ours, our_scales), (values, scales) = (
        k_cache.gather(cache, table, seq_lens, impl=impl) for impl in ("triton", "reference")
    )
    assert torch.equal(our_scales.view(torch.int32), scales.view(torch.int32))
    pages = [row[torch.arange(max(n, 0)) // PAGE] for row, n in zip(table, lengths, strict=True)]
    number = torch.cat(pages)
    real = (number >= 0) & (number < PAGES)
    assert torch.equal(ours.view(torch.uint8)[real], values.view(torch.uint8)[real])


def _gather_bounded(total: int, enabled: int = 1) -> None:
    """With a bound on the host: the same keys, as far as there is room, and nothing disabled."""
    lengths = [17, 0, 40]
    cache = _cache(PAGES, DIM)
    cache.copy_(torch.randint(0, 256, cache.shape, generator=_seed(5), dtype=torch.uint8))
    table = torch.randint(0, PAGES, (3, 3), generator=_seed(6)).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    expected = k_cache.gather(cache, table, seq_lens, impl="reference")
    with patch("torch.empty", torch.zeros):
        ours = k_cache.gather(
            cache, table, seq_lens, total=total, impl="triton",
            enabled=torch.tensor([enabled], dtype=torch.int32),
        )  # fmt: skip
    some = min(total, sum(lengths))
    for mine, right in zip(ours, expected, strict=True):
        assert len(mine) == total
        got, wanted = mine[:some].view(torch.uint8), right[:some].view(torch.uint8)
        assert torch.equal(got, wanted) if enabled else not got.any()
        assert not mine[some:].view(torch.uint8).any()


_CASES: dict[str, Callable[[], None]] = {
    "insert every bf16 value": partial(_all_values, torch.bfloat16, False),
    "insert every bf16 value at scale one": partial(_all_values, torch.bfloat16, True),
    "insert every fp16 value": partial(_all_values, torch.float16, False),
    "insert every fp16 value at scale one": partial(_all_values, torch.float16, True),
    "insert amax at the powers of two": lambda: _same_bytes(
        amax_at_the_powers(), torch.arange(len(amax_at_the_powers()))
    ),
    "insert slots outside": lambda: _same_bytes(*_few()),
    "insert replica": lambda: _same_bytes(*_few(), replica=True),
    "insert unaligned replica": lambda: _same_bytes(*_few(), replica=True, shift=1),
    "insert odd width": lambda: _same_bytes(*_few(dim=37)),
    "insert strided keys": _strided_keys,
    "gather one request": partial(_gather, [300]),
    "gather many requests": partial(_gather, [5, 0, 130, -4, *[1] * 200, 0, 16, 200, 0]),
    "gather into more room": partial(_gather_bounded, 200),
    "gather into less room": partial(_gather_bounded, 30),
    "gather disabled": partial(_gather_bounded, 200, enabled=0),
    "gather unaligned": partial(_gather, [17, 0, 40], shift=1),
    "gather odd width": partial(_gather, [17, 0, 40], dim=37),
}

RUNS = [Run(f"k_cache {name}", check) for name, check in _CASES.items()]
