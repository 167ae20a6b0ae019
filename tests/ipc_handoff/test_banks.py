"""Banks: where their views lie, and when a pool may hand one out again."""

import itertools
import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from ipc_handoff.banks import (
    ANSWERS,
    BANK_REGIONS,
    CONTROL,
    STAGING,
    BankPool,
    HostBank,
    StagingSlot,
    answer_slots,
    k_cache_region,
    staging_slots,
)
from ipc_handoff.control import ServiceControl
from ipc_handoff.errors import RegionError
from ipc_handoff.layout import HandoffGeometry
from ipc_handoff.processes import ProcessWatch
from ipc_handoff.regions import HostMemory
from tests.ipc_handoff.support import GEOMETRY, is_mapped, peer
from tests.support.descriptors import no_descriptor_leaks

G = GEOMETRY


def alive() -> ProcessWatch:
    """A watch of a service that lives (this process)."""
    return ProcessWatch(os.getpid())


@pytest.fixture
def bank() -> HostBank:
    return HostBank(G, 0)


def attach(bank: HostBank, epoch: int) -> ServiceControl:
    bank.control.start(epoch)
    return ServiceControl(bank.memories[CONTROL].view(), G, epoch)


# Where things lie.


def test_a_bank_has_the_regions_that_the_contract_names(bank: HostBank) -> None:
    assert tuple(bank.memories) == BANK_REGIONS
    assert [bank.memories[name].byte_size for name in BANK_REGIONS] == [
        G.control.size,
        G.staging.size,
        G.answers.size,
    ]
    assert k_cache_region(17) == "k_cache/17"


def test_views_have_the_documented_shapes(bank: HostBank) -> None:
    assert len(bank.staging) == len(bank.answers) == G.slots
    for slot in bank.staging:
        views = {f.name: getattr(slot, f.name) for f in fields(slot)}
        found = {name: (view.shape, view.dtype) for name, view in views.items()}
        assert found == {
            "q": ((8, 16, 128), torch.float8_e4m3fn),
            "weights": ((8, 16), torch.float32),
            "query_start": ((5,), torch.int32),
            "seq_lens": ((4,), torch.int32),
            "block_table": ((4, 16), torch.int32),
        }
    for answer in bank.answers:
        assert (answer.shape, answer.dtype) == ((8, 64), torch.int32)


def test_each_view_lies_where_the_layout_says(bank: HostBank) -> None:
    """Fill one view after the other and look at the raw bytes."""
    for number in range(G.slots):
        views = {f.name: getattr(bank.staging[number], f.name) for f in fields(StagingSlot)}
        for name, view in views.items():
            view.view(torch.uint8).fill_(0xAB)
            area = G.staging.areas[name]
            raw = bytes(bank.memories[STAGING].view())
            begin = number * G.staging.slot_size + area.offset
            size = view.numel() * view.element_size()
            assert raw[begin : begin + size] == b"\xab" * size
            assert raw.count(b"\xab") == size
            view.view(torch.uint8).zero_()
        answer = bank.answers[number]
        answer.fill_(-1)
        raw = bytes(bank.memories[ANSWERS].view())
        begin = number * G.answers.slot_size + G.answers.areas["indices"].offset
        assert raw[begin : begin + answer.numel() * 4] == b"\xff" * (answer.numel() * 4)
        assert raw.count(b"\xff") == answer.numel() * 4
        answer.zero_()


def spans(views: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views)


def test_slots_never_overlap(bank: HostBank) -> None:
    staging = [getattr(slot, f.name) for slot in bank.staging for f in fields(slot)]
    for views in (staging, bank.answers):
        placed = spans(views)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(placed))


def test_a_peer_s_views_at_an_offset_show_the_same_bytes() -> None:
    """A bank inside a larger memory."""
    start = 4096
    memory = HostMemory.create(start + G.staging.size, "offset")
    other = HostMemory.open(os.dup(memory.fileno()), writable=True)
    mine, theirs = staging_slots(memory, G, start), staging_slots(other, G, start)
    mine[2].weights.fill_(1.5)
    assert bool((theirs[2].weights == 1.5).all())
    assert not any(memory.view(0, start))


@pytest.mark.parametrize(
    ("views", "size"), [(staging_slots, G.staging.size), (answer_slots, G.answers.size)]
)
def test_a_memory_shorter_than_its_slots_is_refused(
    views: Callable[[HostMemory, HandoffGeometry], object], size: int
) -> None:
    views(HostMemory.create(size, "just right"), G)
    with pytest.raises(RegionError, match="stay inside the memory"):
        views(HostMemory.create(size - 1, "short"), G)


# When a bank may be used again.


def test_the_pool_hands_out_each_bank_once_and_then_none() -> None:
    pool = BankPool(partial(HostBank, G), 2)
    one, two = pool.take(), pool.take()
    assert one is not None
    assert two is not None
    assert one is not two
    assert {one.number, two.number} == {0, 1}
    assert pool.take() is None
    pool.give_back(one)
    assert pool.take() is one
    pool.close()


def test_a_retired_bank_comes_back_after_its_service_drained() -> None:
    pool = BankPool(partial(HostBank, G), 1)
    bank = pool.take()
    assert bank is not None
    service = attach(bank, 1)
    pool.retire(bank, alive())
    assert pool.take() is None
    assert pool.retired == 1
    service.bells.drained()
    assert pool.retired == 0
    assert pool.take() is bank


def test_a_retired_bank_comes_back_after_proof_of_death() -> None:
    pool = BankPool(partial(HostBank, G), 1)
    bank = pool.take()
    assert bank is not None
    attach(bank, 1)
    with peer("send_nothing") as child:
        pool.retire(bank, ProcessWatch(child.pid))
        assert pool.take() is None
    assert pool.take() is bank


def test_a_process_that_cannot_be_watched_never_frees_a_bank() -> None:
    pool = BankPool(partial(HostBank, G), 1)
    bank = pool.take()
    assert bank is not None
    attach(bank, 1)
    pool.retire(bank, ProcessWatch(0))
    assert [pool.take() for _ in range(3)] == [None] * 3
    assert pool.retired == 1


def test_one_retired_bank_does_not_hold_up_another() -> None:
    pool = BankPool(partial(HostBank, G), 2)
    one, two = pool.take(), pool.take()
    assert one is not None
    assert two is not None
    attach(one, 1)
    service = attach(two, 2)
    pool.retire(one, alive())
    pool.retire(two, alive())
    service.bells.drained()
    assert pool.take() is two
    assert pool.take() is None
    assert pool.retired == 1


def test_a_drained_word_of_the_attachment_before_does_not_free_the_next() -> None:
    pool = BankPool(partial(HostBank, G), 1)
    bank = pool.take()
    assert bank is not None
    attach(bank, 1).bells.drained()
    pool.give_back(bank)
    assert pool.take() is bank
    attach(bank, 2)
    pool.retire(bank, alive())
    assert pool.take() is None


class ForgetsRetirement(BankPool):
    """Planted: a retired bank is free at once."""

    def retire(self, bank: HostBank, writer: ProcessWatch) -> None:
        writer.close()
        self.give_back(bank)


def answer_of_a_late_service(pool: BankPool) -> int:
    """What stands in a new attachment's answers when the old service writes late."""
    bank = pool.take()
    assert bank is not None
    attach(bank, 1)
    late = answer_slots(bank.memories[ANSWERS], G)
    pool.retire(bank, alive())
    again = pool.take()
    assert again is not None, "no free bank"
    attach(again, 2)
    again.answers[0].fill_(7)
    late[0].fill_(3)
    return int(again.answers[0][0, 0])


def test_a_service_that_thaws_late_writes_into_no_used_bank_and_into_a_planted_pool_s() -> None:
    assert answer_of_a_late_service(BankPool(partial(HostBank, G), 2)) == 7
    assert answer_of_a_late_service(ForgetsRetirement(partial(HostBank, G), 2)) == 3


def test_the_watch_of_a_retired_bank_is_closed_with_it() -> None:
    pool = BankPool(partial(HostBank, G), 2)
    one, two = pool.take(), pool.take()
    assert one is not None
    assert two is not None
    service = attach(one, 1)
    attach(two, 2)
    with no_descriptor_leaks():
        pool.retire(one, alive())
        service.bells.drained()
        assert pool.take() is one
    watch = alive()
    pool.retire(two, watch)
    assert watch.fileno() is not None
    pool.close()
    assert watch.fileno() is None


# Life.


def test_a_closed_bank_leaves_no_descriptor_and_no_mapping() -> None:
    with no_descriptor_leaks():
        bank = HostBank(G, 77)
        assert is_mapped("dsa-indexer:staging77")
        bank.close()
        del bank
    assert not is_mapped("dsa-indexer:staging77")


def test_a_closed_pool_leaves_no_descriptor_whatever_state_its_banks_are_in() -> None:
    with no_descriptor_leaks():
        pool = BankPool(partial(HostBank, G), 3)
        retired = pool.take()
        assert retired is not None
        attach(retired, 1)
        pool.retire(retired, alive())
        pool.close()
        assert pool.take() is None
        del retired, pool


def test_views_outlive_the_closed_bank() -> None:
    bank = HostBank(G, 78)
    answer = bank.answers[1]
    answer.fill_(5)
    bank.close()
    del bank
    assert int(answer.sum()) == 5 * answer.numel()
    assert is_mapped("dsa-indexer:answers78")
    del answer
    assert not is_mapped("dsa-indexer:answers78")


def test_slots_of_a_larger_step_count_come_round() -> None:
    g = replace(G, slots=5)
    assert [g.staging.slot_of(step) for step in (4, 5, 9, 2**40)] == [4, 0, 4, 2**40 % 5]


def test_a_bank_that_is_not_in_use_is_not_taken_back() -> None:
    pool = BankPool(partial(HostBank, GEOMETRY), banks=1)
    bank = pool.take()
    assert bank is not None
    pool.give_back(bank)
    with pytest.raises(ValueError, match="not in list"):
        pool.give_back(bank)
    pool.close()
