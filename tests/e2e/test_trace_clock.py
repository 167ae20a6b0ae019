"""Stamps are monotonic times, spans are wall times, and wall time may be set at any moment."""

import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from ipc_handoff.stages import SERVICE_SPANS
from tests.support.plants import Pair
from tests.support.traces import assert_whole, attended_step, traced
from tests.support.waiting import eventually

SERVICE = {span.name for span in SERVICE_SPANS}


def test_all_times_are_told_by_one_clock_also_when_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set by hours between steps and inside of one."""
    wall, hours = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: wall() + hours[0] * 3_600_000_000_000)

    def is_inside(step: ReadableSpan, spans: list[ReadableSpan]) -> bool:
        assert step.start_time and step.end_time
        times = [t for s in spans for t in (s.start_time, s.end_time)]
        times += [event.timestamp for event in step.events]
        return all(t and step.start_time <= t <= step.end_time for t in times)

    def whole_step(running: Pair, number: int) -> None:
        """Also exported: the service does it behind the worker's back."""
        attended_step(running)
        attachment = running.session._attachment
        assert attachment is not None
        assert eventually(lambda: attachment.bells.is_exported(number))

    with traced(tmp_path) as (running, both):
        whole_step(running, 1)
        hours[0] = 5
        whole_step(running, 2)
        now = time.time_ns()
        case = running.case()
        with running.session.step(case.inputs, case.layers) as step:
            running.checker.run(step, case)
            hours[0] = -7
        attended_step(running)
    by_step = both.by_step()
    for number in (1, 2, 4):
        spans = by_step[number]
        assert is_inside(assert_whole(spans), spans)
    second = assert_whole(by_step[2])
    assert second.end_time is not None
    assert 0 <= now - second.end_time < 60_000_000_000
    third = [span for span in by_step[3] if span.name not in SERVICE]
    assert is_inside(assert_whole(third), third)
