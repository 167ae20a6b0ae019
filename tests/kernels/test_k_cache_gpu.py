"""k_cache's Triton kernels on a GPU: the reference's bytes, far pages, graphs, replicas."""

import pytest
import torch
from torch import Tensor

from indexer_service.kernels import k_cache
from indexer_service.kernels.compilation import count_compilations
from tests.data.recording import Recording

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
PAGE, DIM = 64, 128
WIDTH = DIM + 4


def seed(number: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(number)


def keys(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random keys of all magnitudes, one in eight of them with any bits at all."""
    size = torch.exp2(torch.randint(-30, 14, (count, 1), generator=seed(1), device=DEVICE).float())
    k = (torch.randn((count, DIM), generator=seed(2), device=DEVICE) * size).to(dtype)
    bits = torch.randint(-(2**15), 2**15, (count, DIM), generator=seed(3), device=DEVICE)
    k[::8] = bits[::8].to(torch.int16).view(dtype)
    return k


def cache(pages: int) -> Tensor:
    return torch.zeros((pages, PAGE, WIDTH), dtype=torch.uint8, device=DEVICE)


def slots_of(count: int, pages: int) -> Tensor:
    slots = torch.randperm(pages * PAGE, generator=seed(4), device=DEVICE)[:count]
    slots[5::7] = -1
    slots[6::70] = pages * PAGE
    return slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_inserted_bytes_equal_the_references(dtype: torch.dtype, shift: int) -> None:
    count, pages = 100_003, 1700
    k, slots = keys(count, dtype), slots_of(count, pages)
    expected = torch.zeros((pages, PAGE, WIDTH), dtype=torch.uint8)
    k_cache.insert(k.cpu(), slots.cpu(), expected)
    room = torch.zeros(2 * pages * PAGE * WIDTH + shift, dtype=torch.uint8, device=DEVICE)
    ours = room[shift:].view(pages, 2, PAGE, WIDTH)[:, 1]
    replica = cache(pages)
    k_cache.insert(k, slots, ours, replica=replica)
    assert torch.equal(ours.cpu(), expected)
    assert torch.equal(replica, ours)
    room[shift:].view(pages, 2, PAGE, WIDTH)[:, 1] = 0
    assert not room.any()


def test_recorded_keys_give_vllms_bytes(recording: Recording) -> None:
    insert = recording.insert
    ours = cache(int(insert.slots.max()) // PAGE + 1)
    k_cache.insert(insert.k.to(DEVICE), insert.slots.to(DEVICE), ours)
    flat = ours.cpu().view(len(ours), -1)
    values = flat[:, : PAGE * DIM].reshape(-1, DIM)[insert.slots]
    scales = flat[:, PAGE * DIM :].contiguous().view(torch.float32).flatten()[insert.slots]
    assert torch.equal(values, insert.values)
    assert torch.equal(scales, insert.scales.squeeze(1))


def test_pages_beyond_32_bits() -> None:
    """Four pages 3 GB apart, written and read."""
    stride = 3_000_000_016
    room = torch.zeros(3 * stride + PAGE * WIDTH, dtype=torch.uint8, device=DEVICE)
    far = torch.as_strided(room, (4, PAGE, WIDTH), (stride, WIDTH, 1))
    near, slots, k = cache(4), slots_of(200, 4), keys(200)
    k_cache.insert(k, slots, far)
    k_cache.insert(k, slots, near)
    assert near.any()
    assert torch.equal(far, near)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([100, 128], dtype=torch.int32, device=DEVICE)
    for ours, theirs in zip(
        k_cache.gather(far, table, lengths),
        k_cache.gather(near.cpu(), table.cpu(), lengths.cpu()),
        strict=True,
    ):
        assert torch.equal(ours.view(torch.uint8).cpu(), theirs.view(torch.uint8))


def test_a_captured_insert_replays() -> None:
    k, slots, ours = keys(64), slots_of(64, 4), cache(4)
    k_cache.insert(k, slots, ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k_cache.insert(k, slots, ours)
    for turn in range(3):
        slots.copy_(slots.roll(1))
        k.copy_(k.roll(turn + 1, 0))
        ours.zero_()
        graph.replay()
        expected = torch.zeros((4, PAGE, WIDTH), dtype=torch.uint8)
        k_cache.insert(k.cpu(), slots.cpu(), expected)
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_replica_on_a_peer_gets_the_same_bytes() -> None:
    k, slots, ours = keys(1000), slots_of(1000, 20), cache(20)
    replica = torch.zeros((20, 2, PAGE, WIDTH), dtype=torch.uint8, device="cuda:1")[:, 1]
    k_cache.insert(k, slots, ours, replica=replica)
    assert ours.any()
    assert torch.equal(replica.to(DEVICE), ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k_cache.insert(k, slots, ours, replica=replica)
    replica.zero_()
    torch.cuda.synchronize("cuda:1")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replica.to(DEVICE), ours)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_gather_equals_the_reference(shift: int) -> None:
    pages = 600
    room = torch.randint(
        0, 256, (pages * PAGE * WIDTH + shift,), generator=seed(5), device=DEVICE
    ).to(torch.uint8)
    stored = room[shift:].view(pages, PAGE, WIDTH)
    lengths = torch.randint(-50, 2000, (300,), generator=seed(6), device=DEVICE).to(torch.int32)
    lengths[::3] %= 3
    lengths[7] = 20_000
    table = torch.randint(0, pages, (300, 314), generator=seed(7), device=DEVICE).to(torch.int32)
    values, scales = k_cache.gather(stored, table, lengths)
    expected = k_cache.gather(stored.cpu(), table.cpu(), lengths.cpu())
    assert torch.equal(values.view(torch.uint8).cpu(), expected[0].view(torch.uint8))
    assert torch.equal(scales.view(torch.int32).cpu(), expected[1].view(torch.int32))


def test_pages_outside_the_cache_are_not_read() -> None:
    table = torch.tensor([[0, 4, -1, 2**31 - 1, -(2**31)]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5 * PAGE], dtype=torch.int32, device=DEVICE)
    _, scales = k_cache.gather(cache(4), table, lengths)
    assert (scales[:PAGE] == 0).all()
    assert scales[PAGE:].isnan().all()


def test_nothing_compiles_for_another_batch_or_stride() -> None:
    lengths = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    table = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    k_cache.insert(keys(3), slots_of(3, 4), cache(4))
    k_cache.gather(cache(4), table, lengths)
    with count_compilations() as compiled:
        for count in (1, 2, 16, 17, 1000):
            wide = torch.zeros((count, 3), dtype=torch.int64, device=DEVICE)
            wide[:, 1] = slots_of(count, 40)
            apart = torch.zeros((40, count, PAGE, WIDTH), dtype=torch.uint8, device=DEVICE)[:, 0]
            k_cache.insert(keys(count), wide[:, 1], apart)
            requests = torch.full((count, 2), 7, dtype=torch.int32, device=DEVICE)
            tables = torch.zeros((count, count), dtype=torch.int32, device=DEVICE)
            k_cache.gather(apart, tables, requests[:, 1])
    assert not compiled
