"""What a pool tells of services that died with a bank in their hands."""

import os
import time
from functools import partial

import pytest

from ipc_handoff.banks import BankPool, HostBank
from ipc_handoff.processes import ProcessWatch
from tests.ipc_handoff.support import GEOMETRY, peer
from tests.ipc_handoff.test_banks import attach


def dead() -> ProcessWatch:
    with peer("send_nothing") as child:
        watch = ProcessWatch(child.pid)
    return watch


@pytest.mark.parametrize("drained", [False, True])
def test_a_death_is_told_once_before_the_bank_is_used_again(drained: bool) -> None:
    """Not of a service that had drained: it ended in good order."""
    pool, told = BankPool(partial(HostBank, GEOMETRY), 1), list[int]()
    bank = pool.take()
    assert bank is not None
    service = attach(bank, 1)
    if drained:
        service.bells.drained()
    pool.retire(bank, dead(), lambda: told.append(len(told)))
    assert pool.take() is bank
    assert told == ([] if drained else [0])
    pool.close()
    assert len(told) <= 1


def test_a_death_is_told_when_the_pool_closes() -> None:
    pool, told = BankPool(partial(HostBank, GEOMETRY), 2), list[str]()
    for watch, name in ((dead(), "dead"), (ProcessWatch(os.getpid()), "alive")):
        bank = pool.take()
        assert bank is not None
        attach(bank, 1)
        pool.retire(bank, watch, lambda name=name: told.append(name))  # type: ignore[misc]
    pool.close()
    assert told == ["dead"]


def test_a_bank_rests_after_a_death_and_not_after_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead process began on a GPU may still write for a while."""
    now, told = [1000.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pool = BankPool(partial(HostBank, GEOMETRY), 1, quarantine_seconds=5.0)
    for drained in (False, True):
        bank = pool.take()
        assert bank is not None
        service = attach(bank, 1)
        if drained:
            service.bells.drained()
        pool.retire(bank, dead(), lambda: told.append(now[0]))
        if drained:
            break
        for seconds, free in ((0.0, False), (4.9, False), (0.2, True)):
            now[0] += seconds
            assert (pool.retired == 0) == free
        assert told == [1000.0]
    assert pool.take() is bank
    assert told == [1000.0]
    pool.close()


def test_a_bank_whose_service_says_late_that_it_drained_rests_no_longer() -> None:
    pool = BankPool(partial(HostBank, GEOMETRY), 1, quarantine_seconds=3600.0)
    bank = pool.take()
    assert bank is not None
    service = attach(bank, 1)
    pool.retire(bank, dead())
    assert pool.take() is None
    service.bells.drained()
    assert pool.take() is bank
    pool.close()


def test_a_replaced_bank_is_made_by_the_factory_under_its_number() -> None:
    made: list[int] = []

    def make(number: int) -> HostBank:
        made.append(number)
        return HostBank(GEOMETRY, number)

    pool = BankPool(make, 2)
    bank = pool.take()
    assert bank is not None
    pool.replace(bank)
    assert made == [0, 1, bank.number]
    again = pool.take()
    assert again is not bank
    assert again is not None
    assert again.number == bank.number
    pool.close()
