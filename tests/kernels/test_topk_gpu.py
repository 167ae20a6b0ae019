"""topk's Triton kernel on a GPU: every way through it, offsets, repeats, graphs, compilations."""

from itertools import product

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import topk
from indexer_service.kernels.compilation import count_compilations
from indexer_service.kernels.topk import launch, plan
from indexer_service.kernels.topk.plan import CONFIGURATIONS, Plan, Sizes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
KINDS = (
    "normal", "positive", "ascending", "descending", "equal", "ties", "many ties", "low bits",
    "few finite", "few lowest", "NaN", "all NaN", "infinities", "zeros", "hot", "periodic",
)  # fmt: skip


def random(seed: int, *shape: int) -> Tensor:
    source = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=source, device=DEVICE)


def scores_of(kind: str, rows: int, length: int) -> Tensor:
    """fp32 [rows, length] of a distribution that some way through the kernel finds hard."""
    x = random(1, rows, length)
    place = torch.arange(length, device=DEVICE)
    pick = random(2, rows, length)
    return {
        "normal": lambda: x,
        "positive": lambda: 100 + 3 * x,
        "ascending": lambda: x.sort(1).values,
        "descending": lambda: x.sort(1, descending=True).values,
        "equal": lambda: torch.full_like(x, -2.5),
        "ties": lambda: (x * 40).round(),
        "many ties": lambda: x.round(),
        "low bits": lambda: (0x3F800000 + (pick * 20).int()).view(torch.float32),
        "few finite": lambda: torch.where(pick > 2.4, x, -torch.inf),
        "few lowest": lambda: torch.where(pick > 2.4, torch.finfo(x.dtype).min, -torch.inf),
        "NaN": lambda: torch.where(pick > 0, x, torch.nan),
        "all NaN": lambda: torch.full_like(x, torch.nan),
        "infinities": lambda: torch.where(pick > 1.5, torch.inf, torch.where(pick > 0, x, -x)),
        "zeros": lambda: torch.where(pick > 0, 0.0, -0.0) + torch.where(x > 2.5, x, 0.0),
        "hot": lambda: x + 50 * ((place >= length // 3) & (place < length // 3 + 3000)),
        "periodic": lambda: x + 9 * (place % 64 == 0),
    }[kind]()


def expected(scores: Tensor, k: int) -> Tensor:
    return topk.select(scores, k, impl="reference")


def select_as(chosen: Plan, scores: Tensor, k: int) -> Tensor:
    out = torch.full((len(scores), k), -77, dtype=torch.int32, device=DEVICE)
    arrived = torch.zeros(len(scores), dtype=torch.int32, device=DEVICE)
    launch.run(chosen, scores, k, out, arrived=arrived)
    assert (arrived == 0).all()
    return out


def plans(rows: int) -> list[Plan]:
    """Every configuration, alone, in turns, and in a few or in many splits."""
    return [
        Plan(sizes, splits, programs, sizes.capacity // plan.GROUP)
        for sizes in CONFIGURATIONS
        for splits, programs in ((1, rows), (1, 2), (3, rows), (plan.MOST_SPLITS, rows))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration_gives_the_reference_s_bits(kind: str) -> None:
    for length, k in ((3000, 2048), (8191, 2048), (20_001, 512), (70_000, 2048), (200_003, 4096)):
        scores = scores_of(kind, 3, length)
        right = expected(scores, k)
        for chosen in plans(len(scores)):
            assert torch.equal(select_as(chosen, scores, k), right), (length, chosen)


@pytest.mark.parametrize("k", [1, 2, 511, 1024, 2049, 4096, 8192, 8193, 30_000])
def test_any_k(k: int) -> None:
    for length in (1, 100, 2048, 8192, 8193, 30_001):
        scores = random(k, 2, length)
        assert torch.equal(topk.select(scores, k, impl="triton"), expected(scores, k)), length


def test_rows_of_a_million_and_more() -> None:
    for rows, length in ((1, 1 << 20), (2, 5_000_001)):
        for scores in (random(7, rows, length), scores_of("equal", rows, length)):
            for k in (512, 4096):
                assert torch.equal(topk.select(scores, k, impl="triton"), expected(scores, k))


def test_bounds_and_rows_that_begin_anywhere() -> None:
    room = random(3, 50, 30_011)
    out = torch.full((50, 305), 5, dtype=torch.int32, device=DEVICE)
    for columns in (slice(0, 30_011), slice(3, 2999), slice(6, 30_000)):
        scores = room[:, columns]
        width = scores.shape[1]
        source = torch.Generator(DEVICE).manual_seed(4)
        bounds = [
            torch.randint(-9, width + 9, (50,), generator=source, device=DEVICE).int()
            for _ in range(2)
        ]
        bounds[0][::3], bounds[1][::4], bounds[0][1] = 0, width, -(2**31)
        for given in (bounds, [None, bounds[1]], [bounds[0], None], [None, None]):
            right = topk.select(scores, 300, *given, impl="reference")
            topk.select(scores, 300, *given, out=out[:, 2:302], impl="triton")
            assert torch.equal(out[:, 2:302], right)
    assert (out[:, :2] == 5).all()
    assert (out[:, 302:] == 5).all()


def test_bounds_at_a_stride() -> None:
    scores = random(9, 40, 20_000)
    source = torch.Generator(DEVICE).manual_seed(10)
    bounds = torch.randint(-9, 20_009, (40, 2), generator=source, device=DEVICE).int()
    start, end = bounds.sort(1).values.unbind(1)
    assert start.stride(0) == 2
    for given in ((start, end), (None, end), (start, None)):
        right = topk.select(scores, 300, *given, impl="reference")
        assert torch.equal(topk.select(scores, 300, *given, impl="triton"), right)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    stride = (1 << 30) + 7
    scores = torch.empty(2 * stride + 70_000, device=DEVICE).as_strided((3, 70_000), (stride, 1))
    scores.copy_(random(5, 3, 70_000))
    out = torch.empty(2 * stride + 600, dtype=torch.int32, device=DEVICE)
    out = out.as_strided((3, 600), (stride, 1))
    topk.select(scores, 600, out=out, impl="triton")
    assert torch.equal(out, expected(scores, 600))
    at = torch.tensor([2 * stride, 0], device=DEVICE)
    ends = torch.tensor([70_000, 5_000], dtype=torch.int32, device=DEVICE)
    arrived = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    flat = scores.as_strided((2 * stride + 70_000,), (1,))
    launch.select_packed(flat, at, ends, arrived, 600, out[:2], longest=1 << 20)
    assert torch.equal(out[:1], expected(scores[2:], 600))
    assert torch.equal(out[1:2], expected(scores[:1, :5_000], 600))


def test_the_same_bits_every_time_and_alone() -> None:
    scores = scores_of("ties", 9, 90_000)
    first = topk.select(scores, 2048, impl="triton")
    for _ in range(20):
        assert torch.equal(topk.select(scores, 2048, impl="triton"), first)
    for row in range(9):
        alone = topk.select(scores[row : row + 1], 2048, impl="triton")
        assert torch.equal(alone, first[row : row + 1])


class Packed:
    """Rows of one buffer, and what `select_packed` is given."""

    def __init__(self, rows: int, longest: int) -> None:
        self.pitch = -(-longest // 64) * 64
        self.longest = longest
        self.scores = random(6, rows * self.pitch)
        self.at = torch.arange(rows, device=DEVICE) * self.pitch
        self.end = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.enabled = torch.ones(1, dtype=torch.int32, device=DEVICE)
        self.out = torch.full((rows, 2048), -77, dtype=torch.int32, device=DEVICE)

    def select(self) -> None:
        launch.select_packed(
            self.scores, self.at, self.end, self.arrived, 2048, self.out,
            longest=self.longest, enabled=self.enabled,
        )  # fmt: skip

    def right(self, lengths: list[int]) -> Tensor:
        rows = self.scores.view(len(lengths), self.pitch)
        ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        return topk.select(rows, 2048, None, ends, impl="reference")


def test_a_captured_graph_follows_lengths_places_and_the_switch() -> None:
    packed = Packed(4, 1 << 20)
    packed.select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed.select()
    for lengths in ([0, 5, 4096, 1 << 20], [-3, 8192, 8193, 60_000], [1, 2048, 2049, 700_001]):
        packed.end.copy_(torch.tensor(lengths, dtype=torch.int32))
        packed.out.fill_(-77)
        graph.replay()
        assert torch.equal(packed.out, packed.right(lengths))
        assert (packed.arrived == 0).all()
        packed.out.fill_(-77)
        packed.enabled.zero_()
        graph.replay()
        assert (packed.out == -77).all()
        packed.enabled.fill_(1)
        packed.at[1], packed.at[3] = -1, -5
        graph.replay()
        assert (packed.out[[1, 3]] == -77).all()
        assert torch.equal(packed.out[[0, 2]], packed.right(lengths)[[0, 2]])
        packed.at.copy_(torch.arange(4) * packed.pitch)


def test_nothing_compiles_for_another_shape() -> None:
    def some(rows: int, length: int, k: int) -> None:
        room = random(8, rows, length + 5)
        ends = torch.full((rows,), length - 1, dtype=torch.int32, device=DEVICE)
        topk.select(room[:, :length], k, impl="triton")
        topk.select(room[:, 3:], k, None, ends, impl="triton")

    for rows, length in product((1, 1000), plan.LENGTHS):
        some(rows, length, 16)
    with count_compilations() as compiled:
        for rows, length, k in ((1, 1, 1), (16, 16, 16), (17, 70_000, 2048), (999, 777, 3)):
            some(rows, length, k)
    assert not compiled


def test_small_constants_take_every_way() -> None:
    """The interpreter's cases with its sizes, as far as a GPU has them."""
    sizes = Sizes(warps=4, registers=128, block=128, sample=128, tile=512, small=512, capacity=512)
    for kind in KINDS:
        for length, k in ((600, 10), (5000, 10), (5000, 100), (5000, 400), (3000, 513)):
            scores = scores_of(kind, 2, length)
            for splits in (1, 5):
                out = select_as(Plan(sizes, splits, 2, 128), scores, k)
                assert torch.equal(out, expected(scores, k)), (kind, length, k, splits)
