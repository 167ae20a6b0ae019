"""CUDA IPC memory between two processes: this one opens, a child owns."""

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from ipc_handoff import cuda_runtime
from ipc_handoff.banks import ANSWERS, BANK_REGIONS, CONTROL, STAGING
from ipc_handoff.cuda_regions import CudaExport, CudaMemory
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.errors import RegionError, RegionUnavailable
from ipc_handoff.regions import HostMemory, SharedTensor, TensorSpec
from tests.ipc_handoff.cuda_children import OFFSET, PART, SIZE, pattern, read, whole
from tests.ipc_handoff.support import GEOMETRY, Peer, peer

pytestmark = pytest.mark.gpu
T = TypeVar("T")


@pytest.fixture(scope="module")
def child() -> Iterator[Peer]:
    with peer("own", program="cuda_children") as process:
        yield process


@pytest.fixture
def owner(child: Peer) -> Iterator[Peer]:
    """The child, with nothing allocated."""
    yield child
    assert child.ask("free") == "freed"
    gc.collect()


def opened(export: CudaExport, owner: str = "child") -> CudaMemory:
    return CudaMemory.open(export, owner=owner, device=0, field_name="answers")


def in_fresh_thread(work: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


class Calls:
    """Counts the handles opened and closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = self.closed = 0
        open_handle, close_handle = cuda_runtime.open_handle, cuda_runtime.close_handle

        def counted_open(ordinal: int, handle: bytes, field: str) -> int:
            self.opened += 1
            return open_handle(ordinal, handle, field)

        def counted_close(ordinal: int, pointer: int) -> None:
            self.closed += 1
            close_handle(ordinal, pointer)

        monkeypatch.setattr(cuda_runtime, "open_handle", counted_open)
        monkeypatch.setattr(cuda_runtime, "close_handle", counted_close)


def test_a_part_of_a_torch_tensor_is_seen_both_ways(owner: Peer) -> None:
    export = read(owner.ask("part 5"))
    assert (export.byte_size, export.offset % 256) == (PART, OFFSET % 256)
    memory = opened(export)
    tensor = whole(memory)
    assert tensor.device == torch.device("cuda:0")
    assert torch.equal(tensor.cpu(), pattern(PART, 5))
    assert owner.ask("set 777 99") == "set"
    assert int(tensor[777]) == 99
    tensor[PART - 1] = 55
    torch.cuda.synchronize()
    assert owner.ask(f"get {PART - 1}") == "55"
    # A view with strides and another dtype, at an offset.
    view = memory.tensor(64, 4096, TensorSpec((4, 8), torch.int32, (16, 2)), "view")
    expected = pattern(PART, 5)[64 : 64 + 256].view(torch.int32).view(4, 8, 2)[:, :, 0]
    assert torch.equal(view.cpu(), expected)


def test_parts_of_one_allocation_are_one_opening_closed_with_the_last(
    owner: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    one, two = read(owner.ask("part 6")), read(owner.ask("another 7"))
    assert (one.handle, one.allocation) == (two.handle, two.allocation)
    first, second, again = opened(one), opened(two), opened(one)
    assert again.pointer == first.pointer == second.pointer + OFFSET
    assert calls.opened == 1
    first.close()
    again.close()
    assert torch.equal(whole(second).cpu(), pattern(OFFSET, 7))
    tensor = whole(second)
    address = second.pointer
    second.close()
    assert calls.closed == 0
    assert torch.equal(tensor.cpu(), pattern(OFFSET, 7))
    del tensor
    gc.collect()
    assert calls.closed == 1
    with pytest.raises(RegionError, match="in no CUDA allocation"):
        cuda_runtime.address_range(0, address, "closed")
    # What was unmapped can be opened again, and CUDA has not suffered.
    assert torch.equal(whole(opened(one)).cpu(), pattern(PART, 6))
    assert calls.opened == 2


def test_memory_allocated_again_at_the_same_address_has_the_new_data(owner: Peer) -> None:
    before = read(owner.ask("allocate 10"))
    address = owner.ask("where")
    memory = opened(before)
    for seed in range(11, 15):
        memory.close()
        assert owner.ask("free") == "freed"
        after = read(owner.ask(f"allocate {seed}"))
        assert owner.ask("where") == address
        assert after.allocation != before.allocation
        memory = opened(after)
        assert torch.equal(whole(memory).cpu(), pattern(SIZE, seed))


def test_a_handle_that_is_open_is_not_taken_for_its_successor(owner: Peer) -> None:
    before = read(owner.ask("allocate 20"))
    memory = opened(before)
    assert owner.ask("free") == "freed"
    after = read(owner.ask("allocate 21"))
    if after.handle == before.handle:
        with pytest.raises(RegionUnavailable, match="unregister the earlier region first"):
            opened(after)
        memory.close()
        gc.collect()
    assert torch.equal(whole(opened(after)).cpu(), pattern(SIZE, 21))


def test_a_handle_opened_before_the_owner_freed_it_shows_the_old_data(owner: Peer) -> None:
    memory = opened(read(owner.ask("allocate 30")))
    assert owner.ask("free") == "freed"
    assert torch.equal(whole(memory).cpu(), pattern(SIZE, 30))


def test_any_thread_opens_views_allocates_and_closes(owner: Peer) -> None:
    export = read(owner.ask("part 8"))

    def work() -> torch.Tensor:
        own = CudaMemory.allocate(4096, 0, "thread")
        memory = opened(export)
        total = whole(memory).sum(dtype=torch.int64) + whole(own).sum()
        memory.close()
        own.close()
        return total.cpu()

    expected = int(pattern(PART, 8).sum(dtype=torch.int64))
    assert int(in_fresh_thread(work)) == expected


def test_a_process_s_own_memory_is_opened_without_a_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch)
    base = torch.arange(5000, device="cuda", dtype=torch.int32)
    shared = SharedTensor.of_cuda(base[1001:2001])
    assert isinstance(shared.memory, CudaMemory)
    memory = opened(shared.memory.export)
    assert memory.pointer == base.data_ptr() + 4004
    assert calls.opened == 0
    shared.memory.close()
    del base, shared
    # Its tensor is kept: torch does not give these bytes to another.
    torch.full((1000,), -1, device="cuda", dtype=torch.int32)
    view = memory.tensor(0, 4000, TensorSpec((1000,), torch.int32), "own")
    assert torch.equal(view.cpu(), torch.arange(1001, 2001, dtype=torch.int32))


def test_a_killed_owner_leaves_the_opener_its_memory_and_its_life() -> None:
    with peer("own", program="cuda_children") as process:
        memory = opened(read(process.ask("part 9")), owner="killed")
        tensor = whole(memory)
        process.kill()
    assert torch.equal(tensor.cpu(), pattern(PART, 9))
    tensor.fill_(3)
    assert int(tensor.sum(dtype=torch.int64)) == 3 * PART
    memory.close()
    del tensor
    gc.collect()
    assert int(torch.ones(10, device="cuda").sum()) == 10


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("backend:cudaMallocAsync", "backend:native"),
    ],
)
def test_memory_without_a_handle_is_refused_and_cuda_goes_on(setting: str, named: str) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    with peer("refuse", program="cuda_children", environment=environment) as process:
        refusal = process.hear()
        assert refusal.startswith("k_cache/3: ")
        assert f"(fix: PYTORCH_CUDA_ALLOC_CONF={named}" in refusal
        assert process.hear() == str(sum(range(1, 1001)))


def test_managed_memory_is_refused_and_cuda_goes_on() -> None:
    from cuda.bindings import driver

    torch.ones(1, device="cuda")
    flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    result, pointer = driver.cuMemAllocManaged(4096, int(flags))
    assert result == driver.CUresult.CUDA_SUCCESS
    with pytest.raises(RegionUnavailable, match=r"k_cache/3: managed memory .*\(fix: "):
        cuda_runtime.exportable_allocation(0, int(pointer), "k_cache/3")
    driver.cuMemFree(pointer)
    assert int(torch.arange(5, device="cuda").sum()) == 10


def test_what_the_owner_says_wrong_is_refused_and_nothing_stays_open(
    owner: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    export = read(owner.ask("allocate 40"))
    for wrong, refusal in (
        (replace(export, byte_size=1 << 30), r"answers\.byte_size: .*stay inside"),
        (replace(export, offset=1 << 40), r"answers\.byte_size: .*stay inside"),
        (replace(export, gpu_uuid="GPU-0"), r"answers\.cuda_ipc\.gpu_uuid: .*\(fix: "),
        (replace(export, handle=bytes(64)), r"answers\.cuda_ipc\.handle: cannot be opened: CUDA_"),
    ):
        with pytest.raises(RegionError, match=refusal):
            opened(wrong)
    assert calls.closed == 2  # The UUID is refused unopened, the handle cannot be opened.
    assert torch.equal(whole(opened(export)).cpu(), pattern(SIZE, 40))


def test_a_uuid_is_the_one_that_torch_and_nvidia_smi_show() -> None:
    shown = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert cuda_runtime.device_uuid(0) == shown
    assert cuda_runtime.device_of_uuid(shown) == 0
    assert cuda_runtime.device_of_uuid("GPU-none") is None


def test_a_bank_on_a_gpu_has_its_own_allocations_and_starts_with_words_of_zero() -> None:
    bank = DeviceBank(GEOMETRY, 4, staging_device=0, answers_device=0)
    layout = GEOMETRY.device
    assert tuple(bank.memories) == BANK_REGIONS
    assert isinstance(bank.memories[CONTROL], HostMemory)
    staging, answers = bank.memories[STAGING], bank.memories[ANSWERS]
    assert isinstance(staging, CudaMemory)
    assert isinstance(answers, CudaMemory)
    assert (staging.pointer, answers.pointer) == (bank.staging_address, bank.answers_address)
    assert (staging.byte_size, answers.byte_size) == (layout.staging_size, layout.answers_size)
    assert staging.export.offset == answers.export.offset == 0
    assert staging.export.handle != answers.export.handle
    inputs, outputs = whole(staging), whole(answers)
    assert not inputs.any()
    assert not outputs.any()
    for round_ in (3, 4):
        inputs.fill_(round_)
        outputs.fill_(round_)
        torch.cuda.synchronize()
        bank.start(round_)
        assert not inputs[: layout.staging_slots].any()
        assert bool((inputs[layout.staging_slots :] == round_).all())
        assert not outputs[: layout.answers_slots].any()
        assert bool((outputs[layout.answers_slots : layout.stamps] == round_).all())
        assert not outputs[layout.stamps :].any()
        assert bank.control.bells.progress() == 0
    bank.close()
    assert bool((inputs[layout.staging_slots :] == 4).all())


def test_closed_memory_is_free_once_its_last_view_is_gone() -> None:
    memory = CudaMemory.allocate(SIZE, 0, "own")
    tensor, address = whole(memory), memory.pointer
    memory.close()
    assert cuda_runtime.address_range(0, address, "own") == (address, SIZE)
    del tensor
    with pytest.raises(RegionError, match="in no CUDA allocation"):
        cuda_runtime.address_range(0, address, "own")
