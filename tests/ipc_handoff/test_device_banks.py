"""Banks in device memory, against a stand-in for the driver."""

from collections.abc import Iterator
from functools import partial

import pytest

from ipc_handoff.banks import ANSWERS, BANK_REGIONS, CONTROL, STAGING, BankPool
from ipc_handoff.control import ServiceControl
from ipc_handoff.cuda_regions import CudaMemory
from ipc_handoff.device_banks import DeviceBank
from ipc_handoff.errors import RegionUnavailable
from ipc_handoff.processes import ProcessWatch
from ipc_handoff.regions import HostMemory
from tests.ipc_handoff.support import GEOMETRY
from tests.support.fake_cuda import Machine, Process, running_as

LAYOUT = GEOMETRY.device


@pytest.fixture
def here() -> Iterator[Process]:
    with running_as(Process(Machine(), 200)) as process:
        yield process


def test_each_region_lies_on_its_reader_s_gpu_in_an_allocation_of_its_own(here: Process) -> None:
    bank = DeviceBank(GEOMETRY, 7, staging_device=1, answers_device=0)
    assert tuple(bank.memories) == BANK_REGIONS
    assert isinstance(bank.memories[CONTROL], HostMemory)
    for name, gpu, size, address in (
        (STAGING, 1, LAYOUT.staging_size, bank.staging_address),
        (ANSWERS, 0, LAYOUT.answers_size, bank.answers_address),
    ):
        memory = bank.memories[name]
        assert isinstance(memory, CudaMemory)
        assert (memory.byte_size, memory.pointer, memory.device) == (size, address, gpu)
        assert (memory.export.offset, memory.export.gpu_uuid) == (0, here.machine.uuid(gpu))
        assert len(here.memories[address].data) == size
    bank.close()
    del bank, memory
    assert not here.memories


def test_gpus_without_a_way_to_each_other_are_refused(here: Process) -> None:
    here.machine.reachable.clear()
    with pytest.raises(RegionUnavailable, match="device: 0 cannot access 1"):
        DeviceBank(GEOMETRY, 7, staging_device=1, answers_device=0)
    DeviceBank(GEOMETRY, 7, staging_device=1, answers_device=1).close()


def test_a_start_zeroes_words_and_stamps_and_leaves_slots(here: Process) -> None:
    bank = DeviceBank(GEOMETRY, 7, staging_device=0, answers_device=0)
    staging = here.bytes_at(bank.staging_address, LAYOUT.staging_size)
    answers = here.bytes_at(bank.answers_address, LAYOUT.answers_size)
    for epoch in (3, 4):
        staging.fill_(epoch)
        answers.fill_(epoch)
        bank.start(epoch)
        assert not staging[: LAYOUT.staging_slots].any()
        assert bool((staging[LAYOUT.staging_slots :] == epoch).all())
        assert not answers[: LAYOUT.answers_slots].any()
        assert bool((answers[LAYOUT.answers_slots : LAYOUT.stamps] == epoch).all())
        assert not answers[LAYOUT.stamps :].any()
        control = bank.memories[CONTROL]
        assert isinstance(control, HostMemory)
        ServiceControl(control.view(), GEOMETRY, epoch)
    bank.close()


def test_a_pool_has_banks_of_this_kind_too(here: Process) -> None:
    pool = BankPool(
        partial(DeviceBank, GEOMETRY, staging_device=0, answers_device=0),
        2,
        quarantine_seconds=60,
    )
    bank = pool.take()
    assert bank is not None
    bank.start(1)
    pool.retire(bank, ProcessWatch(0))
    assert pool.retired == 1
    assert pool.take() is not bank
    pool.close()
    del bank, pool
    assert not here.memories
