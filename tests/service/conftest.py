"""A service for each test module, and workers that leave when their test ends."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from indexer_service.settings import Settings
from tests.service.processes import ServiceProcess
from tests.service.support import LocalService, Worker, running
from tests.support.waiting import SOON


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    path = tmp_path_factory.mktemp("s") / "d" / "i.sock"
    settings = Settings(address=f"unix:{path}", gate_bound_seconds=SOON, max_sessions=32)
    with running(settings) as service:
        yield service


@pytest.fixture
def make_worker(service: LocalService) -> Iterator[Callable[..., Worker]]:
    """Makes workers of this module's service; what they leave behind is taken away."""
    workers: list[Worker] = []

    def make(of: LocalService = service, **fields: Any) -> Worker:
        workers.append(Worker(of, **fields))
        return workers[-1]

    yield make
    for worker in workers:
        with suppress(grpc.RpcError):  # the test may have ended it
            worker.close()
        worker.leave()


@pytest.fixture
def worker(make_worker: Callable[..., Worker]) -> Worker:
    return make_worker().attach()


@pytest.fixture
def neighbour(make_worker: Callable[..., Worker]) -> Iterator[Worker]:
    """A session that must not notice what the test does."""
    worker = make_worker().attach()
    yield worker
    assert worker.works()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """For a service of the test's own."""
    return Settings(
        address=f"unix:{tmp_path}/d/i.sock",
        gate_bound_seconds=SOON,
        shutdown_grace_seconds=2 * SOON,
    )


@pytest.fixture
def processes() -> Iterator[list[ServiceProcess]]:
    started: list[ServiceProcess] = []
    yield started
    for service in started:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()
