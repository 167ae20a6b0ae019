"""What several files of this folder use."""

import pytest

from tests.deploy.watched import Watched, watch


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run of a service and a worker that was watched."""
    return watch(tmp_path_factory.mktemp("watched"))
