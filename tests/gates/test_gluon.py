"""Each fault in a Gluon kernel's source is seen where it runs without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.gates.planted_gluon import FAULTS
from tests.gates.test_gates import lines


@pytest.fixture(scope="module")
def errors(repository: Path) -> dict[str, str | None]:
    """What was said of each fault; the same runs pass without it (`test_gates`)."""
    results = lines(repository, "tests.gates.interpret", "planted_gluon")
    return {run["name"]: run["error"] for run in results}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_gluon_kernel_is_seen(name: str, errors: dict[str, str | None]) -> None:
    assert FAULTS[name].says in (errors[name] or "")
