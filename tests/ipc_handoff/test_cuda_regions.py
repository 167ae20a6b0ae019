"""CUDA IPC memory against a stand-in for the driver: counting, aliasing, refusals."""

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ipc_handoff.cuda_regions import CudaExport, CudaMemory
from ipc_handoff.errors import RegionError, RegionUnavailable
from ipc_handoff.regions import SharedMemory, SharedTensor, TensorSpec
from tests.support.fake_cuda import Machine, Process, running_as

SIZE = 4096


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def worker(machine: Machine) -> Process:
    return Process(machine, 100)


@pytest.fixture
def here(machine: Machine) -> Iterator[Process]:
    with running_as(Process(machine, 200)) as process:
        yield process


def own(process: Process, seed: int, size: int = SIZE) -> tuple[CudaMemory, CudaExport]:
    """Memory of another process, filled with `seed`."""
    with running_as(process):
        memory = CudaMemory.allocate(size, 0, "own")
        process.bytes_at(memory.pointer, size).fill_(seed)
        return memory, memory.export


def free(process: Process, memory: CudaMemory) -> None:
    with running_as(process):
        memory.close()
        gc.collect()


def opened(export: CudaExport, owner: str = "worker", device: int = 0) -> CudaMemory:
    return CudaMemory.open(export, owner=owner, device=device, field_name="answers")


def whole(memory: SharedMemory) -> torch.Tensor:
    spec = TensorSpec((memory.byte_size,), torch.uint8)
    return memory.tensor(0, memory.byte_size, spec, "whole")


# What is exported.


def test_a_part_of_a_tensor_keeps_its_offset_and_its_tensor(worker: Process, here: Process) -> None:
    with running_as(worker):
        tensor = worker.tensor((10, 7), offset=300)
        tensor.data.fill_(9)
        shared = SharedTensor.of_cuda(tensor)
        assert isinstance(shared.memory, CudaMemory)
        export = shared.memory.export
        assert (shared.offset, shared.spec.shape, shared.spec.strides) == (0, (10, 7), (7, 1))
        assert shared.memory._held is not None
        assert shared.memory._held._keeps is tensor
    assert (export.offset, export.byte_size) == (300, 70)
    assert (len(export.handle), export.gpu_uuid) == (64, worker.machine.uuid(0))
    memory = opened(export)
    assert memory.pointer % (1 << 21) == 300
    assert whole(memory).tolist() == [9] * 70


def test_two_allocations_at_one_address_have_one_handle_and_two_numbers(worker: Process) -> None:
    memory, before = own(worker, 1)
    free(worker, memory)
    del memory
    _, after = own(worker, 2)
    assert before.handle == after.handle
    assert before.allocation != after.allocation


def test_allocated_memory_is_zeroed_and_freed_with_its_last_view(here: Process) -> None:
    memory = CudaMemory.allocate(SIZE, 1, "own")
    assert memory.export.gpu_uuid == here.machine.uuid(1)
    tensor = whole(memory)
    assert not tensor.any()
    memory.close()
    memory.close()
    with pytest.raises(RegionError, match="view: the memory is closed"):
        memory.tensor(0, 1, TensorSpec((1,), torch.uint8), "view")
    del memory
    assert len(here.memories) == 1
    del tensor
    assert not here.memories


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vmm", ("no CUDA IPC handle", "expandable_segments:False")),
        ("pool", ("no CUDA IPC handle", "backend:native")),
        ("managed", ("managed memory", "cudaMalloc")),
    ],
)
def test_memory_that_cannot_be_exported_is_refused_with_the_setting(
    kind: str, words: tuple[str, str], here: Process
) -> None:
    tensor = here.tensor((64,), kind=kind)
    with pytest.raises(RegionUnavailable, match=r"^k_cache/3: .*\(fix: ") as caught:
        SharedTensor.of_cuda(tensor, "k_cache/3")
    assert all(word in str(caught.value) for word in words)
    assert not here.contexts
    SharedTensor.of_cuda(here.tensor((64,)), "k_cache/3")


@pytest.mark.parametrize(
    ("tensor", "refusal"),
    [
        (torch.zeros(4), "x: is on cpu"),
        (torch.zeros(4, dtype=torch.uint8), "x: is on cpu"),
    ],
)
def test_a_tensor_of_the_cpu_is_refused(tensor: torch.Tensor, refusal: str) -> None:
    with pytest.raises(RegionError, match=refusal):
        CudaMemory.of_tensor(tensor, "x")


def test_other_dtypes_and_empty_tensors_are_refused(here: Process) -> None:
    tensor = here.tensor((64,))
    tensor.dtype = torch.complex64
    with pytest.raises(RegionError, match=r"x\.data_type: torch.complex64"):
        CudaMemory.of_tensor(tensor, "x")
    empty = here.tensor((64,))
    empty.shape = (0,)
    with pytest.raises(RegionError, match=r"x\.shape"):
        CudaMemory.of_tensor(empty, "x")


def test_no_size_and_no_room_are_refused(here: Process) -> None:
    with pytest.raises(RegionError, match=r"x\.byte_size: 0"):
        CudaMemory.allocate(0, 0, "x")
    with pytest.raises(RegionUnavailable, match=r"x\.byte_size: .*OUT_OF_MEMORY \(fix: "):
        CudaMemory.allocate(1 << 40, 0, "x")
    assert not here.contexts


# What is opened, and until when.


def test_a_handle_is_opened_once_and_closed_with_its_last_user(
    worker: Process, here: Process
) -> None:
    _memory, export = own(worker, 5)
    one, two = opened(export), opened(replace(export, offset=1000, byte_size=100))
    assert two.pointer == one.pointer + 1000
    assert (here.opened, here.closed) == (1, 0)
    tensor = whole(two)
    one.close()
    two.close()
    assert here.closed == 0
    assert tensor.tolist() == [5] * 100
    del tensor
    assert (here.closed, here.memories) == (1, {})
    assert whole(opened(export)).tolist() == [5] * SIZE
    assert here.opened == 2


def test_a_view_of_a_view_keeps_the_mapping(worker: Process, here: Process) -> None:
    _memory, export = own(worker, 5)
    memory = opened(export)
    spec = TensorSpec((4, 8), torch.int32, (16, 2))
    view = memory.tensor(64, 1024, spec, "view")[1:, ::2]
    memory.close()
    gc.collect()
    assert here.closed == 0
    assert int(view[0, 0]) == 0x05050505
    del view
    gc.collect()
    assert here.closed == 1


def test_a_handle_is_not_shared_between_the_gpus_it_is_opened_for(
    worker: Process, here: Process
) -> None:
    _memory, export = own(worker, 5)
    one, two = opened(export, device=0), opened(export, device=1)
    assert here.opened == 2
    one.close()
    two.close()
    assert here.closed == 2


def test_a_handle_open_for_an_earlier_allocation_is_refused_until_that_is_closed(
    worker: Process, here: Process
) -> None:
    memory, before = own(worker, 1)
    earlier = opened(before)
    free(worker, memory)
    del memory
    _memory, after = own(worker, 2)
    assert before.handle == after.handle
    with pytest.raises(RegionUnavailable, match=r"answers\.cuda_ipc\.handle: is open for another"):
        opened(after)
    assert whole(earlier).tolist() == [1] * SIZE
    earlier.close()
    assert whole(opened(after)).tolist() == [2] * SIZE


def test_planted_allocations_without_numbers_of_their_own_show_old_data(
    worker: Process, here: Process
) -> None:
    """What the number is for: the handle alone leads to the memory of before."""
    memory, before = own(worker, 1)
    earlier = opened(replace(before, allocation=7))
    free(worker, memory)
    del memory
    _memory, after = own(worker, 2)
    assert whole(opened(replace(after, allocation=7))).tolist() == [1] * SIZE
    earlier.close()


def test_another_owner_with_the_same_handle_is_refused(worker: Process, here: Process) -> None:
    """A process id that came round: same handle, even the same number."""
    _memory, export = own(worker, 1)
    memory = opened(export, owner="dead")
    with pytest.raises(RegionUnavailable, match="is open for another allocation"):
        opened(export, owner="new")
    memory.close()
    assert opened(export, owner="new").byte_size == SIZE


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"byte_size": SIZE + 1}, r"answers\.byte_size: bytes 0 to 4097 of an allocation of 4096"),
        ({"offset": SIZE}, r"answers\.byte_size: bytes 4096 to 8192 of an allocation"),
        ({"byte_size": 0}, r"answers\.byte_size"),
        ({"gpu_uuid": "GPU-2"}, r"answers\.cuda_ipc\.gpu_uuid: 'GPU-2' is not visible"),
        ({"gpu_uuid": Machine().uuid(1)}, r"answers\.cuda_ipc\.gpu_uuid: .*lies on device 0"),
        ({"handle": bytes(64)}, r"answers\.cuda_ipc\.handle: cannot be opened: CUDA_ERROR_INVALID"),
    ],
)
def test_what_a_peer_says_wrong_is_refused_and_nothing_stays_open(
    change: dict[str, object], refusal: str, worker: Process, here: Process
) -> None:
    _memory, export = own(worker, 1)
    with pytest.raises(RegionError, match=refusal):
        opened(replace(export, **change))  # type: ignore[arg-type]
    assert here.opened == here.closed
    assert not here.contexts
    assert whole(opened(export)).tolist() == [1] * SIZE


def test_memory_on_a_gpu_that_is_not_visible_is_refused_unopened(machine: Machine) -> None:
    """The driver would open it, and could not say where it lies."""
    memory, export = own(Process(machine, 100), 3)
    with running_as(Process(machine, 300, visible=(1,))) as here:
        with pytest.raises(RegionUnavailable, match=r"gpu_uuid: .*CUDA_VISIBLE_DEVICES"):
            opened(export)
        assert here.opened == 0
    memory.close()


def test_own_memory_is_opened_without_a_handle_and_kept(here: Process) -> None:
    tensor = here.tensor((64,), offset=10)
    tensor.data.fill_(4)
    shared = SharedTensor.of_cuda(tensor)
    assert isinstance(shared.memory, CudaMemory)
    memory = opened(shared.memory.export)
    assert memory.pointer == tensor.data_ptr()
    assert here.opened == 0
    shared.memory.close()
    assert memory._held is not None
    assert memory._held._keeps is tensor
    memory.close()
    # Given up by all: the driver itself would refuse its own process's handle.
    with pytest.raises(RegionUnavailable, match="INVALID_CONTEXT"):
        opened(shared.memory.export)


def test_views_are_checked_as_those_of_host_memory(worker: Process, here: Process) -> None:
    _memory, export = own(worker, 1)
    memory = opened(replace(export, offset=2, byte_size=64))
    spec = TensorSpec((4,), torch.int32)
    for offset, size, refusal in (
        (0, 64, r"x\.offset: 0 is not a multiple"),
        (2, 8, r"x\.byte_size: 8, but shape"),
        (52, 16, "stay inside the memory"),
        (-2, 16, "stay inside the memory"),
    ):
        with pytest.raises(RegionError, match=refusal):
            memory.tensor(offset, size, spec, "x")
    assert memory.tensor(2, 16, spec, "x").tolist() == [0x01010101] * 4


def test_a_fresh_thread_has_a_context_for_each_call_and_none_afterwards(here: Process) -> None:
    seen: list[object] = []

    def work() -> None:
        seen.append(CudaMemory.allocate(SIZE, 1, "thread").byte_size)
        seen.append(list(here.contexts))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [SIZE, []]


def test_opening_and_closing_from_many_threads_leaves_nothing_open(
    worker: Process, here: Process
) -> None:
    _memory, export = own(worker, 1)
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                memory = opened(export)
                assert memory.pointer in here.counts
                memory.close()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (here.opened, here.counts) == (here.closed, {})
