"""Each fault in a Gluon kernel's source is seen where it runs without a GPU."""

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.gates.conftest import Results
from tests.gates.jobs import Job
from tests.gates.planted_gluon import FAULTS

# As in test_gates.
pytestmark = pytest.mark.timeout(900)

_JOB = Job("tests.gates.interpret", ("planted_gluon",))


@pytest.mark.parametrize(("job", "fault"), [pytest.param(_JOB, name, id=name) for name in FAULTS])
def test_a_fault_of_a_gluon_kernel_is_seen(job: Job, fault: str, results: Results) -> None:
    """(Without the faults the same runs pass: test_gates.)"""
    (error,) = [run["error"] for run in results(job) if run["name"] == fault]
    assert FAULTS[fault].says in (error or "")
