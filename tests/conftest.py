"""What every test may use."""

import gc
import threading
from pathlib import Path

import pytest
import torch

from indexer_client import control_plane
from indexer_service import step_stream
from indexer_service.errors import ServiceError
from tests.support.waiting import SOON

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


@pytest.fixture(autouse=True)
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that stands still for a second fails no call of a test; settings may, if asked."""
    monkeypatch.setattr(control_plane, "_QUICK_SECONDS", SOON)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a service of this process ends a stream because its reports are not read."""
    ended, error = threading.Event(), step_stream._unread

    def end() -> ServiceError:
        ended.set()
        return error()

    monkeypatch.setattr(step_stream, "_unread", end)
    return ended


def pytest_collection_finish() -> None:
    """What the imports made stays: the collector need not look at it in every test again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they do not run where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
