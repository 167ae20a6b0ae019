"""Steps of a service on a GPU, interpreted: cases pass, and fail with a guard taken out."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.support.cases import check


def test_each_case_is_right_and_each_planted_fault_is_seen(repository: Path) -> None:
    check(repository, "tests.service.device_step_cases", cases=19, planted=8, seconds=240)
