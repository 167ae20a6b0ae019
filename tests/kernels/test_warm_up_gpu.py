"""After warm-up nothing compiles, whatever a session asks for, and all of it can be captured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import indexer, k_cache, topk, tuned_file
from indexer_service.kernels.architecture import processors
from indexer_service.kernels.compilation import count_compilations
from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.topk import plan
from indexer_service.kernels.warm_up import warm_up

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
PAGE, DIM, WIDTH, PAGES = 64, 128, 132, 700


def seed(number: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(number)


def random_bytes(*shape: int) -> Tensor:
    """e4m3 codes that are no NaN, and small scales."""
    return torch.randint(0, 0x60, shape, generator=seed(1), device=DEVICE).to(torch.uint8)


def apart(tensor: Tensor) -> Tensor:
    """The same values in larger rows, the first of them not aligned."""
    room = torch.zeros(
        (*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype, device=DEVICE
    )
    room[..., 1:-2] = tensor
    return room[..., 1:-2]


def decode(
    heads: int, batch: int, next_n: int, context: int, k: int, strided: bool, by_row: bool
) -> tuple[Callable[[Tensor], object], Tensor]:
    """A call for captured and eager runs, which takes `enabled`, and its output."""
    place = apart if strided else torch.Tensor.contiguous
    layers = random_bytes(PAGES, 3, PAGE, WIDTH)
    rows = batch * next_n
    lengths = torch.randint(-5, context, (batch, next_n), generator=seed(2), device=DEVICE).int()
    columns = -(-context // PAGE)
    table = torch.randint(0, PAGES, (batch, columns), generator=seed(3), device=DEVICE).int()
    q = place(random_bytes(batch, next_n, heads, DIM))
    weights = place(torch.randn((rows, heads), generator=seed(4), device=DEVICE))
    lengths = place(lengths if by_row else lengths[:, :1])
    table = place(table)
    out = place(torch.zeros((rows, k), dtype=torch.int32, device=DEVICE))

    def call(enabled: Tensor) -> object:
        return indexer.select_paged(
            q, layers[:, 1], weights, lengths if by_row else lengths[:, 0], table, k, out=out,
            enabled=enabled,
        )  # fmt: skip

    return call, out


def prefill(
    heads: int, rows: int, keys: int, k: int, strided: bool
) -> tuple[Callable[[Tensor], object], Tensor]:
    place = apart if strided else torch.Tensor.contiguous
    bounds = torch.randint(0, keys, (2, rows), generator=seed(5), device=DEVICE).int()
    start, end = (place(bound) for bound in bounds.sort(0).values)
    q, codes = place(random_bytes(rows, heads, DIM)), place(random_bytes(keys, DIM))
    weights = place(torch.randn((rows, heads), generator=seed(6), device=DEVICE))
    scales = place(torch.rand(keys, generator=seed(7), device=DEVICE))
    out = place(torch.zeros((rows, k), dtype=torch.int32, device=DEVICE))

    def call(enabled: Tensor) -> object:
        return indexer.select_ragged(
            q, codes, scales, weights, start, end, k, out=out, enabled=enabled
        )

    return call, out


def check_captured(call: Callable[[Tensor], object], out: Tensor) -> None:
    """A captured graph gives the eager call's bits, and leaves `out` alone when switched off."""
    enabled = torch.ones(1, dtype=torch.int32, device=DEVICE)
    call(enabled)
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(enabled)
    out.fill_(-7)
    graph.replay()
    assert torch.equal(out, eager)
    enabled.zero_()
    out.fill_(-7)
    graph.replay()
    assert (out == -7).all()


ARCHITECTURES = pytest.mark.parametrize("arch", [None, "80"], ids=["this GPU", "sm80"])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str | None) -> None:
    monkeypatch.setenv(tuned_file.CACHE_DIRECTORY, str(tmp_path))
    if arch:
        monkeypatch.setenv("DSA_INDEXER_FORCE_ARCH", arch)


@ARCHITECTURES
def test_after_warm_up_nothing_compiles_and_all_can_be_captured(
    arch: str | None,
) -> None:
    heads = 32
    geometry = Geometry(
        heads=heads, max_context=40_000, max_decode_rows=300, max_prefill_rows=600,
        page_stride=3 * PAGE * WIDTH, next_n=(1, 3),
    )  # fmt: skip
    told: list[tuple[int, int]] = []
    report = warm_up(geometry, DEVICE, progress=lambda done, total, _: told.append((done, total)))
    assert told == [(done, report.batches) for done in range(report.batches)]
    assert report.kernels
    assert tuned_file.path(DEVICE).exists()

    with count_compilations() as compiled:
        for strided in (False, True):
            calls = [
                decode(heads, batch, next_n, context, k, strided, by_row)
                for batch, next_n, context, k, by_row in (
                    (1, 1, 40_000, 2048, False), (2, 1, 63, 7, True), (17, 3, 9_000, 512, False),
                    (100, 3, 2_000, 1, True), (299, 1, 5_000, 2047, False), (5, 3, 3, 16, True),
                )
            ]  # fmt: skip
            calls += [
                prefill(heads, rows, keys, k, strided)
                for rows, keys, k in ((1, 1, 3), (16, 40_000, 2048), (599, 1_777, 100))
            ]
            for call, out in calls:
                check_captured(call, out)
            for keys in (1, 3, 600):
                k = apart(torch.randn((keys, DIM), generator=seed(8), device=DEVICE).bfloat16())
                slots = torch.arange(keys, device=DEVICE)
                k_cache.insert(k, slots, random_bytes(PAGES, 3, PAGE, WIDTH)[:, 2])
    assert not compiled


@ARCHITECTURES
def test_a_context_of_a_million_tokens(arch: str | None) -> None:
    from indexer_service.kernels.topk.kernel import topk_kernel

    heads, context, k = 32, 1 << 20, 2048
    assert plan.choose(1, context, k, processors=processors(DEVICE)).sizes is plan.LONG
    topk_kernel.device_caches.clear()  # what tests before this one made
    geometry = Geometry(heads=heads, max_context=context, max_decode_rows=4, max_prefill_rows=16,
                        page_stride=3 * PAGE * WIDTH, k=k)  # fmt: skip
    warm_up(geometry, DEVICE)

    scores = torch.randn((3, context), generator=seed(9), device=DEVICE)
    bounds = torch.randint(0, context, (2, 3), generator=seed(10), device=DEVICE).int()
    with count_compilations() as compiled:
        for call, out in (
            decode(heads, 1, 1, context, k, False, False),
            decode(heads, 3, 1, context, k, True, True),
            prefill(heads, 3, context, k, False),
        ):
            check_captured(call, out)
        for given in ((None, None), tuple(bounds.sort(0).values)):
            topk.select(scores, k, *given)
    assert not compiled
