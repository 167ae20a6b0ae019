"""What every test may use."""

from pathlib import Path

import pytest
import torch

# Small selections gain nothing from more threads, and threads that wait for each other take the
# cores away from the other processes of a test.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> None:
    """Also behind a test, or an engine of it, that takes more."""
    request.addfinalizer(lambda: torch.set_num_threads(1))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they do not run where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
