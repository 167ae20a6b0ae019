"""What several files of this folder use."""

from collections.abc import Iterator

import pytest

from tests.deploy.watched import Watched, watched


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run of a service and a worker that was watched."""
    with watched(tmp_path_factory.mktemp("watched")) as found:
        yield found
