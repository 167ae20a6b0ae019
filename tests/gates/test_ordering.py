"""Which accesses `ordering` takes for ordered, beyond what the planted kernels show."""

import numpy as np
import pytest

from tests.gates.ordering import ATOMIC, LOAD, STORE, Ordering, Program, Race

DATA, COUNTER, OTHER = 1 << 20, 1 << 21, 1 << 22


class Launch:
    """Programs numbered from 0 that touch 4 bytes at a time."""

    def __init__(self) -> None:
        self.ordering = Ordering()

    def _access(self, kind: str, program: int, address: int, size: int = 4) -> None:
        self.ordering.access(kind, self._name(program), np.array([address], np.uint64), size)

    @staticmethod
    def _name(program: int) -> Program:
        return (program, 0, 0)

    def load(self, program: int, address: int = DATA, size: int = 4) -> None:
        self._access(LOAD, program, address, size)

    def store(self, program: int, address: int = DATA, size: int = 4) -> None:
        self._access(STORE, program, address, size)

    def add(self, program: int, address: int = DATA) -> None:
        """One of many atomics of a tensor: orders nothing."""
        self._access(ATOMIC, program, address)

    def barrier(self, program: int) -> None:
        self.ordering.barrier(self._name(program))

    def meet(self, program: int, address: int = COUNTER, sem: str = "acq_rel") -> None:
        self.ordering.single_atomic(
            self._name(program), address, 4, acquire="acq" in sem, release="rel" in sem
        )


@pytest.fixture
def launch() -> Launch:
    return Launch()


def test_order_passes_through_a_third_program(launch: Launch) -> None:
    launch.store(0)
    launch.barrier(0)
    launch.meet(0)
    launch.meet(1)
    launch.meet(1, OTHER)
    launch.meet(2, OTHER)
    launch.load(2)
    launch.store(2)


def test_a_relaxed_atomic_in_between_does_not_end_what_was_published(launch: Launch) -> None:
    launch.store(0)
    launch.barrier(0)
    launch.meet(0)
    launch.meet(1, sem="")
    launch.meet(2)
    launch.load(2)


def test_another_counter_orders_nothing(launch: Launch) -> None:
    launch.store(0)
    launch.barrier(0)
    launch.meet(0)
    launch.meet(1, OTHER)
    with pytest.raises(Race, match="programs"):
        launch.load(1)


def test_what_is_stored_after_the_release_is_not_published(launch: Launch) -> None:
    launch.meet(0)
    launch.store(0)
    launch.barrier(0)
    launch.meet(1)
    with pytest.raises(Race, match="programs"):
        launch.load(1)


def test_accesses_that_overlap_by_a_byte_meet(launch: Launch) -> None:
    launch.store(0, DATA)
    launch.load(1, DATA + 4)
    with pytest.raises(Race, match="programs"):
        launch.load(1, DATA + 3, size=1)


def test_all_earlier_loads_must_be_ordered_before_a_store(launch: Launch) -> None:
    for program in (0, 1):
        launch.load(program)
    launch.barrier(1)
    launch.meet(1)
    launch.meet(2)
    with pytest.raises(Race, match=r"\(0, 0, 0\) and \(2, 0, 0\)"):
        launch.store(2)


def test_atomics_do_not_race_with_each_other_but_with_loads_and_stores(launch: Launch) -> None:
    launch.add(0)
    launch.add(1)
    for touch in (launch.load, launch.store):
        with pytest.raises(Race, match="nothing orders it after the atomic"):
            touch(2)
    for program in (0, 1, 2):
        launch.barrier(program)
        launch.meet(program)
    launch.load(2)
    launch.barrier(2)
    launch.store(2)


def test_loads_alone_never_race(launch: Launch) -> None:
    for program in range(50):
        launch.load(program)


def test_a_store_must_not_follow_an_own_store_without_a_barrier(launch: Launch) -> None:
    launch.store(0)
    with pytest.raises(Race, match="its own store"):
        launch.store(0)
    launch.barrier(0)
    launch.store(0)
