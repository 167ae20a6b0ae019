"""What a pool tells of services that died with a bank in their hands."""

import os
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
