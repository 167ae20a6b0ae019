"""Shared memory: what stays alive, and what a kill leaves behind."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ipc_handoff.descriptors import DescriptorServer
from ipc_handoff.errors import RegionError
from ipc_handoff.regions import HostMemory, SharedTensor, TensorSpec
from tests.ipc_handoff.support import is_mapped, peer
from tests.support.descriptors import no_descriptor_leaks

SIZE = 1 << 16
BYTES = TensorSpec((SIZE,), torch.uint8)
NONCE = bytes(range(16))


def files_in_dev_shm(*pids: int) -> set[str]:
    """Named shared memory that these processes hold: it would outlive a kill."""
    held: list[str] = []
    for pid in pids:
        held += Path(f"/proc/{pid}/maps").read_text().splitlines()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the listing's own
                held.append(os.readlink(link))
    return {name for name in held if "/dev/shm/" in name}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DescriptorServer]:
    server = DescriptorServer(str(tmp_path / "descriptors"))
    yield server
    server.close()


# Between unrelated processes.


def test_a_worker_s_memory_is_read_and_written_here_and_survives_its_kill(
    server: DescriptorServer, tmp_path: Path
) -> None:
    before = files_in_dev_shm(os.getpid())
    inbox = server.expect(NONCE, lambda: None)
    with peer("own_memory", tmp_path / "descriptors", NONCE.hex(), SIZE) as child:
        assert child.hear() == "sent"
        descriptor = inbox.take(16)
        assert descriptor is not None
        memory = HostMemory.open(descriptor, writable=True)
        assert memory.byte_size == SIZE
        tensor = memory.tensor(0, SIZE, BYTES, "x")
        assert torch.equal(tensor, (torch.arange(SIZE) % 251).to(torch.uint8))
        assert child.ask("1000 7") == str(1000 % 251)
        assert int(tensor[1000]) == 7
        tensor[2000] = 9
        assert child.ask("2000 0") == "9"
        # A strided view at an offset: rows of 16 bytes, 100 apart.
        view = memory.tensor(52, 1000, TensorSpec((5, 4), torch.int32, (25, 1)), "y")
        assert torch.equal(view.view(torch.uint8)[3], tensor[352:368])
        assert files_in_dev_shm(os.getpid(), child.pid) == before
    assert int(tensor[1000]) == 7
    tensor.fill_(1)
    assert int(tensor.sum()) == SIZE
    memory.close()


def test_a_service_that_is_killed_leaves_the_owner_s_memory_as_it_was() -> None:
    before = files_in_dev_shm(os.getpid())
    memory = HostMemory.create(SIZE, "kept")
    tensor = memory.tensor(0, SIZE, BYTES, "x")
    tensor.fill_(5)
    with peer("open_memory", memory.fileno(), descriptors=(memory.fileno(),)) as child:
        assert child.hear() == "mapped"
        assert child.ask(17) == "5"
        tensor[17] = 6
        assert child.ask(17) == "6"
        assert files_in_dev_shm(os.getpid(), child.pid) == before
    assert int(tensor.sum()) == 5 * SIZE + 1
    memory.close()


@pytest.fixture(scope="module")
def endings() -> dict[str, int]:
    """How each case of `children.crash_or_not` ended."""
    with peer("crash_or_not") as child:
        lines = [child.hear().split() for _ in range(7)]
    return {name: int(code) for name, code in lines}


@pytest.mark.parametrize(
    ("case", "ending"),
    [
        ("read_through_a_read_only_tensor", 0),
        ("write_through_a_read_only_tensor", -signal.SIGSEGV),
        ("write_through_a_writable_tensor", 0),
        ("read_after_close", 0),
        ("planted_read_of_a_closed_mmap", -signal.SIGSEGV),
        ("shrunk_sealed_file", 0),
        ("planted_shrunk_unsealed_file", -signal.SIGBUS),
    ],
)
def test_process_end_of(case: str, ending: int, endings: dict[str, int]) -> None:
    assert endings[case] == ending


# Life of a mapping.


@pytest.mark.parametrize("order", ["memory first", "tensor first"])
def test_the_mapping_goes_with_the_last_of_memory_and_tensors(order: str) -> None:
    memory = HostMemory.create(SIZE, "last-holder")
    tensor = memory.tensor(0, SIZE, BYTES, "x")
    row = memory.tensor(64, 64, TensorSpec((8, 8), torch.uint8), "y")[3]
    tensor.fill_(3)
    if order == "memory first":
        memory.close()
        del memory, tensor
        assert int(row.sum()) == 24
        assert is_mapped("dsa-indexer:last-holder")
        del row
    else:
        del tensor, row
        assert is_mapped("dsa-indexer:last-holder")
        memory.close()
    assert not is_mapped("dsa-indexer:last-holder")


def test_closing_again_does_nothing_and_using_it_afterwards_is_refused() -> None:
    with no_descriptor_leaks():
        memory = HostMemory.create(SIZE, "closed")
        memory.close()
        memory.close()
    for use in (memory.fileno, memory.view, lambda: memory.tensor(0, SIZE, BYTES, "x")):
        with pytest.raises(RegionError, match="the memory is closed"):
            use()


def test_a_closed_number_that_was_given_to_another_file_is_not_closed_again() -> None:
    memory = HostMemory.create(SIZE, "number")
    number = memory.fileno()
    memory.close()
    os.dup2(1, number)
    memory.close()
    os.fstat(number)
    os.close(number)


def test_fresh_memory_is_zero_sealed_and_closed_on_exec() -> None:
    memory = HostMemory.create(SIZE, "fresh")
    assert not any(memory.view())
    seals = fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fileno(), size)
    assert not os.get_inheritable(memory.fileno())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_read_only_memory_of_a_peer_shows_what_the_owner_writes() -> None:
    owner = HostMemory.create(SIZE, "owner")
    reader = HostMemory.open(os.dup(owner.fileno()), writable=False)
    seen = reader.tensor(0, SIZE, BYTES, "x")
    owner.tensor(0, SIZE, BYTES, "x").fill_(8)
    assert int(seen.sum()) == 8 * SIZE
    with pytest.raises(TypeError):
        reader.view()[0] = 1


# A tensor with memory of its own.


def test_a_shared_tensor_is_seen_by_whoever_maps_its_memory() -> None:
    shared = SharedTensor.allocate((4, 8), torch.float32, "shared")
    assert not shared.tensor.any()
    other = HostMemory.open(os.dup(shared.memory.fileno()), writable=True)
    other.tensor(shared.offset, 128, shared.spec, "x").fill_(2.5)
    assert bool((shared.tensor == 2.5).all())


def test_two_shared_tensors_in_one_memory() -> None:
    memory = HostMemory.create(256, "two")
    one = SharedTensor.in_memory(memory, TensorSpec((16,), torch.int32))
    two = SharedTensor.in_memory(memory, TensorSpec((16,), torch.int32), 64)
    one.tensor.fill_(1)
    two.tensor.fill_(2)
    assert int(one.tensor.sum()) == 16
    with pytest.raises(RegionError):
        SharedTensor.in_memory(memory, TensorSpec((16,), torch.int32), 224)


def test_a_shared_tensor_of_no_elements_is_refused() -> None:
    with pytest.raises(RegionError, match=r"k\.shape"):
        SharedTensor.allocate((4, 0), torch.float32, "k")


def test_many_memories_come_and_go_without_a_leak() -> None:
    with no_descriptor_leaks():
        for _ in range(200):
            memory = HostMemory.create(4096, "many")
            tensor = memory.tensor(0, 4096, TensorSpec((4096,), torch.uint8), "x")
            memory.close()
            del memory, tensor
    assert not is_mapped("dsa-indexer:many")
