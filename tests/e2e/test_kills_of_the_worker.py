"""A worker killed or frozen at random moments, while another worker's steps go on."""

import os
import random
import time
from pathlib import Path

import pytest

from indexer_client import ClientSettings
from tests.e2e.conftest import Start
from tests.support.processes import left_in, nothing_mapped
from tests.support.runs import Run, later, running
from tests.support.waiting import SOON, eventually
from tests.support.workers import WorkerProcess

MOMENTS = 20
LONGEST_MOMENT = 0.08
LEASE = 6.0
# Of the bystander, which nothing but the service is to disturb.
PATIENT = {"wait_bound_seconds": 2 * SOON, "rpc_timeout_seconds": SOON}


def _until_answered(worker: WorkerProcess, bystander: Run, more: int) -> None:
    """Steps of the bystander until the service has answered `more` layers of the worker."""
    wanted = worker.answered + more
    bystander.until(lambda: worker.answered >= wanted or not worker.is_alive)
    assert worker.is_alive


def _shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "dsa" in name}


@pytest.mark.parametrize("signalling", ["ring", "stream"])
def test_killed_at_random_moments(
    signalling: str,
    start: Start,
    socket: Path,
    client_settings: ClientSettings,
    moments: random.Random,
) -> None:
    service, shared = start(), _shared_files()
    files = set(left_in(socket.parent))
    client_settings = client_settings.model_copy(update={"signalling": signalling})
    seed = moments.randrange(2**20)
    with running(client_settings.model_copy(update=PATIENT), seed) as bystander:
        bystander.attached_steps()
        theirs = 0
        for number in range(MOMENTS):
            worker = WorkerProcess(seed + 1 + number, client_settings)
            _until_answered(worker, bystander, 1)
            timer = later(moments.uniform(0, LONGEST_MOMENT), worker.kill)
            bystander.until(lambda: not worker.is_alive)  # noqa: B023
            timer.join()
            assert worker.wait() == -9
            # Its death is noticed by itself, long before its lease runs out.
            assert eventually(lambda: len(service.status().sessions) == 1)
            if number == 2:
                theirs = len(service.descriptors())
        assert eventually(lambda: len(service.descriptors()) <= theirs), service.descriptors()
        assert bystander.session.statistics.detachments == 0
        assert bystander.session.statistics.inline_layers == 0
    bystander.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))
    assert _shared_files() == shared
    assert set(left_in(socket.parent)) == files
    assert service.stop() == 0
    assert left_in(socket.parent) == []


def test_frozen_and_thawed_at_random_moments(
    start: Start, client_settings: ClientSettings, moments: random.Random
) -> None:
    """For less and for more than its lease; its gates end, its answers stay right."""
    service = start(lease_seconds=LEASE, gate_bound_seconds=0.3)
    seed = moments.randrange(2**20)
    with running(client_settings.model_copy(update=PATIENT), seed) as bystander:
        bystander.attached_steps()
        worker = WorkerProcess(seed + 1, client_settings)
        theirs = 0
        for number in range(MOMENTS):
            _until_answered(worker, bystander, 3)
            timer = later(moments.uniform(0, LONGEST_MOMENT), worker.freeze)
            bystander.step()
            timer.join()
            frozen_for = 1.3 * LEASE if number == MOMENTS // 2 else moments.uniform(0, 0.5)
            thawed = time.monotonic() + frozen_for
            bystander.until(lambda: time.monotonic() > thawed)  # noqa: B023
            worker.thaw()
            if number == 2:
                _until_answered(worker, bystander, 3)
                theirs = len(service.descriptors())
        _until_answered(worker, bystander, 3)
        assert eventually(lambda: len(service.descriptors()) <= theirs), service.descriptors()
        assert worker.finish() == 0
        bystander.attached_steps()
        assert bystander.session.statistics.detachments == 0
    bystander.checker.assert_right()
    assert eventually(lambda: nothing_mapped(service))
    assert service.stop() == 0
