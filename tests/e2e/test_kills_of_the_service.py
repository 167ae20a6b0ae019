"""The service killed or frozen at random moments: no wrong answer, no hang, nothing left."""

import os
import random
import time
from pathlib import Path

import pytest

from indexer_client import ClientSettings, Session, Source
from ipc_handoff.findings import FindingKind
from tests.e2e.conftest import Start
from tests.support.findings import Kept
from tests.support.processes import descriptors, left_in, nothing_mapped
from tests.support.runs import later, running
from tests.support.waiting import SOON, eventually
from tests.support.workloads import Checker, RandomSteps, Shape

MOMENTS = 20
WAIT_BOUND = 0.2
# Longer than most steps: moments fall before, into and behind every stage.
LONGEST_MOMENT = 0.08


@pytest.fixture
def settings(client_settings: ClientSettings) -> ClientSettings:
    """For services that freeze: calls to them end soon."""
    return client_settings.model_copy(update={"rpc_timeout_seconds": 1.0})


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_killed_at_random_moments(
    signalling: str,
    start: Start,
    client_settings: ClientSettings,
    moments: random.Random,
    socket: Path,
) -> None:
    shared = set(os.listdir("/dev/shm"))
    client_settings = client_settings.model_copy(update={"signalling": signalling})
    service = start()
    with running(client_settings, moments.randrange(2**20)) as run:
        run.attached_steps()
        few = 0
        for number in range(MOMENTS):
            timer = later(moments.uniform(0, LONGEST_MOMENT), service.kill)
            run.until_detached()
            timer.join()
            for _ in range(2):
                assert set(run.step()) == {Source.INLINE}
            service = start()
            run.attached_steps()
            assert run.session.statistics.detachments == number + 1
            if number == 2:
                few = len(descriptors())
        assert eventually(lambda: len(descriptors()) <= few), descriptors()
        # The process's death ends the wait, not its bound.
        assert run.slowest < client_settings.wait_bound_seconds / 2
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
        run.attached_steps()
        few = theirs = 0
        pool = run.session._caretaker._pool
        for number in range(MOMENTS):
            run.freeze_in_use(service, WAIT_BOUND, lambda: moments.uniform(0, LONGEST_MOMENT))
            # One bound in all: the steps until the thaw wait for nobody.
            with run.waiting(WAIT_BOUND):
                for _ in range(3):
                    assert set(run.step()) == {Source.INLINE}
            time.sleep(moments.uniform(0, 0.3))
            service.thaw()
            run.attached_steps()
            assert eventually(lambda: pool.retired == 0)
            if number == 2:
                few, theirs = len(descriptors()), len(service.descriptors())
        assert run.slowest < SOON
        assert eventually(lambda: len(descriptors()) <= few), descriptors()
        assert eventually(lambda: len(service.descriptors()) <= theirs), service.descriptors()
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))
    assert service.stop() == 0


def test_frozen_while_workers_attach(
    start: Start, settings: ClientSettings, moments: random.Random
) -> None:
    """No moment of an attachment leaves a bank behind that is never free again."""
    service = start(lease_seconds=1.0)
    bounds = {"rpc_timeout_seconds": 0.3, "wait_bound_seconds": WAIT_BOUND}
    quick = settings.model_copy(update=bounds)
    with running(quick, moments.randrange(2**20)) as run:
        run.attached_steps()
        for _ in range(MOMENTS):
            # Ends the attachment; the next one begins at once.
            run.session._attachment.detach("wanted by the test")  # type: ignore[union-attr]
            timer = later(moments.uniform(0, 0.02), service.freeze)
            run.step()
            timer.join()
            time.sleep(moments.uniform(0.2, 0.5))
            service.thaw()
            run.attached_steps()
        assert eventually(lambda: run.session.last_error is None)
    run.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))


def test_a_dead_service_costs_one_bound_and_not_one_a_layer(
    start: Start, settings: ClientSettings
) -> None:
    """Frozen, so that only the bound ends the wait: 40 layers, one wait that runs out."""
    service = start()
    settings = settings.model_copy(update={"wait_bound_seconds": WAIT_BOUND})
    steps, checker, kept = RandomSteps(Shape(layers=(1, 2, 3, 4)), 3), Checker(), Kept()
    with Session(
        steps.geometry, steps.k_caches, steps.fallback, settings=settings, findings=kept
    ) as session:
        session.wait_attached(SOON)
        service.freeze()
        for number in range(10):
            case = steps.case(number)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
        service.thaw()
    checker.assert_right()
    assert kept.kinds == [FindingKind.WAIT_ENDED]
    assert session.statistics.detachments == 1
    assert session.statistics.inline_layers == 40
    steps.close()
