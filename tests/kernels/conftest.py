"""Fixtures of the kernels' tests."""

import pytest

from indexer_service.kernels.architecture import FORCE_ARCH
from tests.data.recording import Recording, load

FORMS = {"this GPU": None, "sm89": "89", "sm80": "80"}


@pytest.fixture(scope="session")
def recording() -> Recording:
    """The step recorded inside vLLM."""
    return load()


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The kernels of this GPU, and those that older ones run."""
    forced: str | None = request.param
    if forced:
        monkeypatch.setenv(FORCE_ARCH, forced)
    return forced
