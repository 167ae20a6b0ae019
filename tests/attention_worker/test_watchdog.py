"""The thread that tells waiting kernels of the service's death."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from attention_worker.watchdog import Watchdog
from ipc_handoff.processes import ProcessWatch
from tests.support.waiting import eventually


@pytest.fixture
def order() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@pytest.fixture
def watchdog(order: torch.Tensor) -> Iterator[Watchdog]:
    made = Watchdog(order)
    made.start()
    yield made
    made.close()


@pytest.fixture
def service() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_a_death_ends_the_waits_of_that_attachment(
    watchdog: Watchdog, order: torch.Tensor, service: subprocess.Popen[bytes]
) -> None:
    watch = ProcessWatch(service.pid)
    watchdog.watch(7, watch)
    watch.close()  # the pool closes it when it likes
    assert not watchdog.is_dead(7)
    assert int(order) == 0
    service.kill()
    assert eventually(lambda: int(order) == 7)
    assert eventually(lambda: watchdog.is_dead(7))


def test_the_death_of_an_earlier_service_says_nothing_of_the_next_one(
    watchdog: Watchdog, order: torch.Tensor, service: subprocess.Popen[bytes]
) -> None:
    watch = ProcessWatch(service.pid)
    watchdog.watch(1, watch)
    watchdog.end(1)
    assert int(order) == 1
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as second:
        watchdog.watch(2, ProcessWatch(second.pid))
        service.kill()
        service.wait()
        assert not eventually(lambda: watchdog.is_dead(2), seconds=0.2)
        second.kill()
        assert eventually(lambda: watchdog.is_dead(2))
    watch.close()


def test_a_service_that_cannot_be_watched_is_left_to_the_bound(
    watchdog: Watchdog, order: torch.Tensor
) -> None:
    watchdog.watch(3, ProcessWatch(0))
    assert not eventually(lambda: int(order) != 0, seconds=0.1)
    watchdog.end(3)
    assert int(order) == 3


@pytest.mark.parametrize("is_started", [False, True])
def test_a_second_close_does_nothing(is_started: bool) -> None:
    order = torch.zeros(1, dtype=torch.int64)
    watchdog = Watchdog(order)
    if is_started:
        watchdog.start()
    for number in (1, 2):
        watchdog.end(number)
        watchdog.close()
        assert int(order) == number
