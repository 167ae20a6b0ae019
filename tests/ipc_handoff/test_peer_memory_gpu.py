"""Kernels on one GPU that use shared memory of another, between two processes and within one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ipc_handoff import cuda_runtime
from ipc_handoff.banks import STAGING
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.errors import RegionUnavailable
from tests.ipc_handoff.cuda_children import SIZE, pattern, read, whole
from tests.ipc_handoff.support import GEOMETRY, peer

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


class At:
    """An address, as Triton takes it."""

    dtype = torch.uint8

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def copy(device: int, source: Any, target: Any, count: int) -> None:
    """By a kernel on `device`, wherever the memory lies."""
    with torch.cuda.device(device):
        _copy[(triton.cdiv(count, 1024),)](source, target, count, BLOCK=1024)
        torch.cuda.synchronize()


def test_a_kernel_reads_and_writes_another_process_s_memory_on_another_gpu() -> None:
    with peer("own", program="cuda_children") as owner:
        export = read(owner.ask("allocate 50"))
        memory = CudaMemory.open(export, owner="child", device=1, field_name="answers")
        here = torch.empty(SIZE, dtype=torch.uint8, device="cuda:1")
        copy(1, At(memory.pointer), here, SIZE)
        assert torch.equal(here.cpu(), pattern(SIZE, 50))
        copy(1, pattern(SIZE, 51).to("cuda:1"), At(memory.pointer), SIZE)
        assert owner.ask("get 4321") == str(int(pattern(SIZE, 51)[4321]))
        # Opened for its kernels, it is that GPU's for torch.
        assert whole(memory).device == torch.device("cuda:1")
        assert cuda_runtime.holder_of(1, memory.pointer) == 0


@pytest.mark.parametrize("device", [0, 1])
def test_memory_that_says_the_other_gpu_is_refused(device: int) -> None:
    with peer("own", program="cuda_children") as owner:
        export = read(owner.ask("allocate 60"))
        wrong = replace(export, gpu_uuid=cuda_runtime.device_uuid(1))
        with pytest.raises(RegionUnavailable, match=r"answers\.cuda_ipc\.gpu_uuid: .*lies on"):
            CudaMemory.open(wrong, owner="child", device=device, field_name="answers")
        memory = CudaMemory.open(export, owner="child", device=device, field_name="answers")
        assert torch.equal(whole(memory).cpu(), pattern(SIZE, 60))


def test_a_worker_s_kernel_writes_its_bank_s_staging_on_the_service_s_gpu() -> None:
    bank = DeviceBank(GEOMETRY, 5, staging_device=1, answers_device=0)
    size = GEOMETRY.device.staging_size
    copy(0, pattern(size, 3).to("cuda:0"), At(bank.staging_address), size)
    staging = bank.memories[STAGING]
    assert isinstance(staging, CudaMemory)
    assert torch.equal(whole(staging).cpu(), pattern(size, 3))
    assert whole(staging).device == torch.device("cuda:1")
    bank.close()


def test_each_gpu_has_a_uuid_and_reaches_the_other() -> None:
    uuids = [cuda_runtime.device_uuid(ordinal) for ordinal in (0, 1)]
    assert [cuda_runtime.device_of_uuid(uuid) for uuid in uuids] == [0, 1]
    assert cuda_runtime.can_access_peer(0, 1)
    cuda_runtime.enable_peer_access(0, 1)
    cuda_runtime.enable_peer_access(0, 1)
