"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.data.recording import Recording, load


@pytest.fixture(scope="session")
def recording() -> Recording:
    """The step recorded inside vLLM."""
    return load()


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Lets a test change torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
