"""The service killed or frozen at random moments: no wrong answer, no hang, nothing left."""

import os
import random
import time
from pathlib import Path

import pytest

from indexer_client import ClientSettings, Session, Source
from tests.e2e.conftest import Start
from tests.support.processes import descriptors, left_in, nothing_mapped
from tests.support.runs import SOON, later, running
from tests.support.waiting import eventually
from tests.support.workloads import Checker, RandomSteps, Shape

MOMENTS = 20
REATTACH_SECONDS = 2.0
WAIT_BOUND = 0.2
# Longer than most steps: moments fall before, into and behind every stage.
LONGEST_MOMENT = 0.08


@pytest.fixture
def settings(client_settings: ClientSettings) -> ClientSettings:
    return client_settings.model_copy(update={"wait_bound_seconds": WAIT_BOUND})


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_killed_at_random_moments(
    signalling: str,
    start: Start,
    settings: ClientSettings,
    moments: random.Random,
    socket: Path,
) -> None:
    shared = set(os.listdir("/dev/shm"))
    settings = settings.model_copy(update={"signalling": signalling, "wait_bound_seconds": 1.0})
    service = start()
    with running(settings, moments.randrange(2**20)) as run:
        run.attached_steps(SOON)
        few = 0
        for number in range(MOMENTS):
            timer = later(moments.uniform(0, LONGEST_MOMENT), service.kill)
            run.until_detached()
            timer.join()
            for _ in range(2):
                assert set(run.step()) == {Source.INLINE}
            service = start()
            run.attached_steps(REATTACH_SECONDS)
            assert run.session.statistics.detachments == number + 1
            if number == 2:
                few = len(descriptors())
        assert eventually(lambda: len(descriptors()) <= few), descriptors()
        # The process's death ends the wait, not its bound.
        assert run.slowest < settings.wait_bound_seconds + SOON / 2
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))
    assert service.stop() == 0
    assert left_in(socket.parent) == []
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_frozen_and_thawed_at_random_moments(
    signalling: str, start: Start, settings: ClientSettings, moments: random.Random
) -> None:
    settings = settings.model_copy(update={"signalling": signalling})
    service = start()
    with running(settings, moments.randrange(2**20)) as run:
        run.attached_steps(SOON)
        few = theirs = 0
        for number in range(MOMENTS):
            timer = later(moments.uniform(0, LONGEST_MOMENT), service.freeze)
            detached = run.session.statistics.detachments
            run.until_detached()
            timer.join()
            # One bound in all: the steps until the thaw wait for nobody.
            for _ in range(3):
                assert set(run.step()) == {Source.INLINE}
            time.sleep(moments.uniform(0, 0.3))
            service.thaw()
            run.attached_steps(REATTACH_SECONDS + settings.rpc_timeout_seconds)
            # One too many only where a busy machine holds up a healthy service for a bound.
            assert run.session.statistics.detachments <= detached + 2
            if number == 2:
                few, theirs = len(descriptors()), len(service.descriptors())
        assert run.slowest < WAIT_BOUND + SOON / 2
        assert eventually(lambda: len(descriptors()) <= few), descriptors()
        assert eventually(lambda: len(service.descriptors()) <= theirs), service.descriptors()
        pool = run.session._caretaker._pool
        assert eventually(lambda: pool.retired == 0)
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))
    assert service.stop() == 0


def test_frozen_while_workers_attach(
    start: Start, settings: ClientSettings, moments: random.Random
) -> None:
    """No moment of an attachment leaves a bank behind that is never free again."""
    service = start(lease_seconds=1.0)
    quick = settings.model_copy(update={"rpc_timeout_seconds": 0.3})
    with running(quick, moments.randrange(2**20)) as run:
        run.attached_steps(SOON)
        for _ in range(MOMENTS):
            # Ends the attachment; the next one begins at once.
            run.session._attachment.detach("wanted by the test")  # type: ignore[union-attr]
            timer = later(moments.uniform(0, 0.02), service.freeze)
            run.step()
            timer.join()
            time.sleep(moments.uniform(0.2, 0.5))
            service.thaw()
            run.attached_steps(REATTACH_SECONDS + 1)
        assert run.session.last_error is None
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))


def test_a_dead_service_costs_one_bound_and_not_one_a_layer(
    start: Start, settings: ClientSettings
) -> None:
    """Frozen, so that only the bound ends the wait: 40 layers, one bound."""
    bound = 1.0
    service = start()
    slow = settings.model_copy(update={"wait_bound_seconds": bound})
    steps, checker = RandomSteps(Shape(layers=(1, 2, 3, 4)), 3), Checker()
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=slow) as session:
        session.wait_attached(SOON)
        service.freeze()
        began = time.monotonic()
        for number in range(10):
            case = steps.case(number)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
        took = time.monotonic() - began
        service.thaw()
    checker.assert_right()
    assert bound < took < 5 * bound
    assert session.statistics.detachments == 1
    assert session.statistics.inline_layers == 40
    steps.close()
