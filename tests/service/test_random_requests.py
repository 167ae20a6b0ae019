"""Thousands of random and mutated requests: documented codes only, and nobody else notices.

`python -m tests.service.fuzz` sends as many as are wanted.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from indexer_service.engine import EngineSettings
from indexer_service.engines.cpu import CpuEngine
from indexer_service.settings import Settings
from tests.service.support import LocalService, Worker, running
from tests.service.victim import CALLS, INTERNAL, KINDS, MOST_MUTATIONS, Victim
from tests.support.waiting import eventually

REQUESTS = 2150


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    path = tmp_path_factory.mktemp("s") / "d" / "i.sock"
    bounds = {"gate_bound_seconds": 0.002, "max_sessions": 256, "lease_seconds": 3600}
    with running(Settings(address=f"unix:{path}", **bounds)) as service:
        yield service


class FailingEngine(CpuEngine):
    def select(self, *_: object) -> None:
        raise ZeroDivisionError("of the engine")


@pytest.mark.parametrize("call", ["RunSteps", "SelectTopK"])
def test_a_step_that_fails_is_seen_in(call: str, tmp_path: Path) -> None:
    """What the random requests look for."""
    engine = FailingEngine(EngineSettings(workspace_bytes=1 << 24, cpu_threads=1))
    engine.warm_up = lambda: None  # type: ignore[method-assign]
    with running(Settings(address=f"unix:{tmp_path}/d/i.sock"), engine=engine) as service:
        victim = Victim(service)
        code, details = victim.send(call, victim.request(call).SerializeToString())
        assert (code, details) == (INTERNAL, "engine: of the engine")
        victim.leave()


def test_random_and_mutated_requests(quick: LocalService) -> None:
    neighbour = Worker(quick).attach()
    assert neighbour.works()
    victim = Victim(quick)
    seen: dict[str, set[grpc.StatusCode]] = {call: set() for call in CALLS}
    sent = 0

    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        # A failure is named by its seed; making it smaller would take thousands of requests.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        call=st.sampled_from(CALLS),
        seed=st.integers(0, 2**32),
        mutations=st.integers(0, MOST_MUTATIONS),
        garbage=st.binary(max_size=200),
        kind=st.sampled_from(KINDS),
    )
    def send_one(call: str, seed: int, mutations: int, garbage: bytes, kind: str) -> None:
        nonlocal sent
        chance = random.Random(seed)
        seen[call].add(victim.send_random(call, kind, mutations, garbage, chance))
        sent += 1
        if sent % 100 == 0:
            assert neighbour.works()

    send_one()
    assert sent >= 2000
    assert all(len(codes) > 1 for call, codes in seen.items() if call != "GetStatus"), seen
    assert neighbour.works()
    assert quick.status().serving and quick.status().pid == os.getpid()
    victim.leave()
    neighbour.close()
    neighbour.leave()
    victim.close_opened()
    assert eventually(lambda: quick.status().mapped_bytes == 0)
