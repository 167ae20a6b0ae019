"""Steps on a GPU that fail: launches, kernels that cannot be made, and a GPU that is lost."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from indexer_service.device_stream import told_when_lost
from indexer_service.executor import DeviceLost
from indexer_service.step_kernels import StepKernels
from tests.service.fake_gpu_bench import GEOMETRY, Bench
from tests.support.waiting import eventually


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.stream.error = None
    made.runner.close()


def test_a_launch_that_fails_is_reported_and_the_next_step_is_answered(bench: Bench) -> None:
    bench.fails = ValueError("a bug")
    bench.submit()
    assert bench.reported(1) == ["FAILED"]
    assert bench.reports[0].message == "engine: a bug"
    assert bench.given_up == [1]
    bench.fails = None
    for _ in range(GEOMETRY.slots + 1):
        bench.submit()
    assert bench.reported(1, 2, 3, 4, 5)[1:] == ["ANSWERED"] * 4


def test_a_lost_gpu_ends_the_session_and_is_told(bench: Bench) -> None:
    bench.stream.holds = True
    bench.submit()
    bench.begun(1)
    bench.stream.error = torch.AcceleratorError("CUDA error: an illegal memory access")
    assert bench.lost.wait(10)
    assert bench.reported(1) == ["FAILED"]
    assert "illegal memory access" in bench.reports[0].message
    assert eventually(lambda: bench.runner.ended)
    assert bench.worker.control.bells.is_drained()
    assert not bench.stream.is_closed


def test_launches_whose_end_fails_too_keep_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fails = ValueError("a bug")
    with monkeypatch.context() as patch:
        patch.setattr(StepKernels, "give_up", _fail)
        steps = [bench.submit() for _ in range(GEOMETRY.slots + 1)]
        assert set(bench.reported(*steps)) == {"FAILED"}
    assert {report.message for report in bench.reports} == {"engine: another bug"}
    bench.fails = None
    steps.append(bench.submit())
    assert bench.reported(*steps)[-1] == "ANSWERED"


def test_a_gpu_that_is_lost_while_a_launch_is_given_up_is_told(bench: Bench) -> None:
    bench.fails = ValueError("a bug")
    bench.stream.error = torch.AcceleratorError("CUDA error: an illegal memory access")
    bench.submit()
    assert bench.lost.wait(10)
    assert bench.reported(1) == ["FAILED"]
    assert eventually(bench.worker.control.bells.is_drained)


def _fail(*_: Any) -> None:
    raise ValueError("another bug")


def test_drained_is_said_also_when_closing_fails(bench: Bench) -> None:
    bench.stream.on_synchronize = _fail
    bench.runner.close()
    assert bench.worker.control.bells.is_drained()


def test_a_gpu_that_is_lost_at_the_very_end_is_told(bench: Bench) -> None:
    ends = [lambda: None, bench.stream.check]

    def synchronize() -> None:
        bench.stream.error = torch.AcceleratorError("CUDA error: unspecified launch failure")
        ends.pop(0)()

    bench.stream.on_synchronize = synchronize
    bench.runner.close()
    assert bench.lost.is_set()
    assert bench.worker.control.bells.is_drained()
    assert not bench.stream.is_closed


def test_kernels_that_cannot_be_made_are_not_tried_again_before_regions_change(
    bench: Bench,
) -> None:
    def submit() -> None:
        bench.runner.submit(bench.worker.make([2, 2], [100, 50]).plan, bench.reports.append)

    bench.engine.breaks = RuntimeError("out of memory")
    bench.engine.may_prepare.set()
    submit()
    bench.reported(1)
    assert "are being made" in bench.reports[0].message
    preparation = bench.runner._executor._preparation  # type: ignore[attr-defined]
    assert eventually(lambda: preparation._thread is None)
    submit()
    submit()
    assert bench.reported(1, 2, 3) == ["CANCELLED"] * 3
    why = "kernels for rows_per_decode 2 could not be made: out of memory"
    assert [report.message for report in bench.reports[1:]] == [why, why]
    assert bench.engine.tries == 1
    assert bench.submit() == 4  # others go on
    assert bench.reported(1, 2, 3, 4)[3] == "ANSWERED"
    bench.engine.breaks = None
    with bench.runner.quiesced():
        pass
    assert eventually(lambda: bench.stream.captured == 2 * bench.graphs)
    submit()
    assert eventually(lambda: bench.engine.tries == 2)


def test_a_gpu_that_is_lost_while_kernels_are_made_is_told(bench: Bench) -> None:
    bench.engine.breaks = DeviceLost("an illegal memory access")
    bench.engine.may_prepare.set()
    bench.runner.submit(bench.worker.make([2, 2], [100, 50]).plan, bench.reports.append)
    assert bench.lost.wait(10)
    assert eventually(lambda: bench.runner.ended)
    assert bench.worker.control.bells.is_drained()


def test_steps_whose_kernels_are_not_made_yet_are_given_up_at_once(bench: Bench) -> None:
    def submit() -> None:
        plan = bench.worker.make([2, 2], [100, 50]).plan
        bench.runner.submit(plan, bench.reports.append)

    submit()
    submit()
    assert bench.reported(1, 2) == ["CANCELLED", "CANCELLED"]
    assert bench.given_up == [1, 2]
    assert eventually(lambda: len(bench.watcher.times) == 2)
    assert bench.watcher.times == [(), ()], "no times are not lost ones"
    assert bench.submit() == 3  # others go on
    assert bench.reported(1, 2, 3)[2] == "ANSWERED"
    bench.engine.may_prepare.set()
    assert eventually(lambda: bench.stream.captured == 2 * bench.graphs)
    launched = bench.stream.launched
    submit()
    assert bench.reported(1, 2, 3, 4)[3] == "ANSWERED"
    assert bench.stream.launched == launched + 1


@pytest.mark.parametrize("how", ["close", "regions change"])
def test_what_is_made_aside_is_broken_off(bench: Bench, how: str) -> None:
    bench.runner.submit(bench.worker.make([2, 2], [100, 50]).plan, bench.reports.append)
    bench.reported(1)
    if how == "close":
        bench.runner.close()
    else:
        with bench.runner.quiesced():
            pass
    assert bench.engine.stopped == 1


@pytest.mark.parametrize("works", [True, False])
def test_only_an_error_behind_which_its_own_gpu_does_not_work_loses_it(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from a thread whose current device is another one, and is well or lost the other way."""
    device = torch.device("cuda", 1)

    def look(asked: torch.device | None = None) -> tuple[int, int]:
        if (asked == device) == works:
            return 0, 0
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    expected = RuntimeError if works else DeviceLost
    with pytest.raises(expected, match=r"^out of memory$"), told_when_lost(device):
        raise RuntimeError("out of memory\nand more" if not works else "out of memory")
