"""Steps of a worker on a GPU, interpreted: each case passes, and fails with its guard taken out."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.support.cases import check


def test_each_case_is_right_and_each_planted_fault_is_seen(repository: Path) -> None:
    check(
        repository, "tests.attention_worker.device_step_plants", cases=39, planted=22, seconds=300
    )
