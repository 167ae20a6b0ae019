"""What is left after a good end: nothing, in either process and on any file system."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from indexer_client import ClientSettings, Session
from tests.e2e.conftest import Start
from tests.support.processes import descriptors, mapped_memories
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape


@contextmanager
def no_collector() -> Iterator[None]:
    """What reference counts do not free inside is not freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _work(settings: ClientSettings, steps: RandomSteps) -> None:
    checker = Checker()
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        session.wait_attached(SOON)
        for number in range(3):
            case = steps.case(number)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
    checker.assert_right()
    assert not session.statistics.inline_layers


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_the_service_unmaps_with_the_session_and_not_with_the_collector(
    signalling: str, start: Start, client_settings: ClientSettings
) -> None:
    service = start(collects_garbage=False)
    settings = client_settings.model_copy(update={"signalling": signalling})
    steps = RandomSteps(Shape(), 1)
    _work(settings, steps)
    before = service.descriptors()
    for _ in range(3):
        _work(settings, steps)
        assert service.status().mapped_bytes == 0
        assert service.mapped_memories() == []
    assert eventually(lambda: len(service.descriptors()) <= len(before))
    steps.close()


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_the_worker_keeps_nothing_of_a_closed_session(
    signalling: str, start: Start, client_settings: ClientSettings
) -> None:
    start()
    settings = client_settings.model_copy(update={"signalling": signalling})
    _work(settings, RandomSteps(Shape(), 1))  # what is made once a process
    with no_collector():
        before, mapped = descriptors(), set(mapped_memories())
        for _ in range(3):
            steps = RandomSteps(Shape(), 1)
            _work(settings, steps)
            steps.close()
            del steps
        assert set(mapped_memories()) <= mapped
        # gRPC closes its own behind the call.
        assert eventually(lambda: len(descriptors()) <= len(before)), descriptors()


def test_a_stopped_service_leaves_no_file(
    start: Start, client_settings: ClientSettings, socket: Path
) -> None:
    shared = set(os.listdir("/dev/shm"))
    service = start()
    assert socket.parent.is_dir()
    _work(client_settings, RandomSteps(Shape(), 1))
    assert service.stop() == 0
    assert not socket.parent.exists()
    assert set(os.listdir("/dev/shm")) <= shared


def test_a_service_that_stops_under_a_session_leaves_no_file(
    start: Start, client_settings: ClientSettings, socket: Path
) -> None:
    service = start()
    steps, checker = RandomSteps(Shape(), 1), Checker()
    with Session(
        steps.geometry, steps.k_caches, steps.fallback, settings=client_settings
    ) as session:
        session.wait_attached(SOON)
        for number in range(3):
            case = steps.case(number)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
            if number == 0:
                assert service.stop() == 0
                assert not socket.parent.exists()
    checker.assert_right()
