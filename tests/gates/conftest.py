"""The gates' processes: all that the chosen tests need begin at once, a core at a time."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gates.forks import Forks
from tests.gates.jobs import Job

Results = Callable[[Job], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """The JSON lines that a job's process prints."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    values = [value for found in parameters for value in found.values()]
    chosen = dict.fromkeys(value for value in values if isinstance(value, Job))
    forks = Forks(repository, os.cpu_count() or 1, tmp_path_factory.mktemp("output"))
    started = {
        job: forks.submit(
            job.tree(repository, tmp_path_factory.mktemp("tree")), job.module, *job.arguments
        )
        for job in chosen
    }
    yield lambda job: started[job].result()
    forks.close()
