"""Services in processes of their own, and sessions that notice their loss soon."""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer_client import ClientSettings
from tests.support.processes import ServiceProcess
from tests.support.waiting import SOON

Start = Callable[..., ServiceProcess]


@pytest.fixture
def moments() -> random.Random:
    """Chooses when something happens; pytest shows the seed when a test fails."""
    seed = secrets.randbelow(2**32)
    print(f"seed of the moments: {seed}")
    return random.Random(seed)


@pytest.fixture
def socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a service may listen; its directory is the service's own."""
    return tmp_path_factory.mktemp("s") / "d" / "i.sock"


@pytest.fixture
def start(socket: Path) -> Iterator[Start]:
    """Starts services; those that are left are killed."""
    started: list[ServiceProcess] = []

    def start(**settings: Any) -> ServiceProcess:
        wanted = {"gate_bound_seconds": SOON, "lease_seconds": 2 * SOON, **settings}
        started.append(ServiceProcess(wanted.pop("socket", socket), **wanted))
        return started[-1]

    yield start
    for service in started:
        service.kill()


@pytest.fixture
def client_settings(socket: Path) -> ClientSettings:
    """Waits and calls end with an answer or with the service: who freezes one asks for less."""
    return ClientSettings(
        address=f"unix:{socket}",
        wait_bound_seconds=2 * SOON,
        rpc_timeout_seconds=SOON,
        reattach_seconds=0.2,
    )
