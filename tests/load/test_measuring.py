"""What is counted, and how: arrivals, histograms, growth, verdicts."""

import itertools
import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsa_indexer_cli.load.arrivals import arrivals
from dsa_indexer_cli.load.collector import Collector, ShapeKey
from dsa_indexer_cli.load.durations import duration
from dsa_indexer_cli.load.histograms import Histogram
from dsa_indexer_cli.load.messages import NOT_BEGUN, Column, width
from dsa_indexer_cli.load.resources import GpuSample, Sample, growth, sample
from dsa_indexer_cli.load.result import LoadResult, Service, judge
from dsa_indexer_cli.load.steps import Kind
from dsa_indexer_cli.load.worker import NO_TIME
from dsa_indexer_cli.load.workload import Load, Soak, Workload
from ipc_handoff.regions import HostMemory

SECOND = 1_000_000_000
LAYERS = 2


def record(intended: float, began: float, ended: float, **fields: int) -> np.ndarray:
    """A step; times in seconds."""
    values = np.full(width(LAYERS), NO_TIME, dtype=np.int64)
    values[: len(Column)] = 0
    values[Column.INTENDED] = int(intended * SECOND)
    values[Column.BEGAN] = NOT_BEGUN if began < 0 else int(began * SECOND)
    values[Column.ENDED] = int(ended * SECOND)
    for name, value in {
        "REQUESTS": 3,
        "ROWS": 3,
        "LONGEST": 100,
        "LAYERS": LAYERS,
        "FORWARD": NO_TIME,
        **fields,
    }.items():
        values[Column[name]] = value
    if began >= 0:
        values[len(Column) :] = int((ended - began) / 2 * SECOND)
    return values


def test_arrivals_of_an_open_loop_have_the_rate_and_are_settled_beforehand() -> None:
    for kind in ("poisson", "constant"):
        load = Load(mode="open", rate=100.0, arrivals=kind)
        times = list(arrivals(load, 0, 60 * SECOND, seed=5))
        assert times == list(arrivals(load, 0, 60 * SECOND, seed=5))
        assert 5600 < len(times) < 6400
        gaps = np.diff(times) / SECOND
        spread = gaps.std() / gaps.mean()
        assert spread < 0.01 if kind == "constant" else 0.9 < spread < 1.1


def test_sessions_do_not_begin_together() -> None:
    load = Load(mode="open", rate=1.0, arrivals="constant")
    firsts = {next(arrivals(load, 0, 9 * SECOND, seed=seed)) for seed in range(8)}
    assert len(firsts) == 8


def test_a_closed_loop_asks_at_once_and_ends() -> None:
    begin = time.monotonic_ns()
    times = list(arrivals(Load(mode="closed"), begin, begin + SECOND // 50, seed=1))
    assert times and times[-1] < begin + SECOND // 50


def test_recorded_arrivals() -> None:
    load = Load(mode="recorded")
    assert list(arrivals(load, 5, 2 * SECOND, 1, [0.5, 1.0, 7.0])) == [
        5 + SECOND // 2,
        5 + SECOND,
    ]


def test_a_stall_counts_on_every_step_that_waited_behind_it() -> None:
    """One step of a second among a hundred of a millisecond, every ten milliseconds."""
    collector = Collector(0, 2.0)
    free = 0.0
    for number in range(100):
        intended = number * 0.01
        began = max(intended, free)
        free = began + (1.0 if number == 10 else 0.001)
        collector.add(record(intended, began, free)[None])
    # From its beginning only one of a hundred steps is slow; from arrival most of them are.
    assert collector.step.percentile(98) < 2
    assert collector.response.percentile(50) > 500


def test_steps_that_were_never_begun_count_with_the_time_they_waited() -> None:
    collector = Collector(0, 1.0)
    collector.add(np.stack([record(0.1, 0.1, 0.2), record(0.2, -1, 5.2)]))
    assert (collector.steps, collector.unserved) == (1, 1)
    assert collector.response.count == 2
    assert collector.response.percentile(100) == pytest.approx(5000, rel=0.01)
    assert collector.step.count == 1


def test_time_on_the_gpu_is_counted_where_there_is_one() -> None:
    collector = Collector(0, 1.0)
    collector.add(np.stack([record(0.1, 0.1, 0.2, FORWARD=3_000_000), record(0.2, 0.2, 0.3)]))
    assert collector.step.count == 2
    assert (collector.forward.count, collector.forward.percentile(50)) == pytest.approx(
        (1, 3.0), rel=0.002
    )


def test_layers_whose_time_is_not_known_are_counted_as_asked() -> None:
    collector = Collector(0, 1.0)
    unknown = record(0.1, 0.1, 0.2)
    unknown[len(Column) :] = NO_TIME
    collector.add(unknown[None])
    assert (collector.layers, collector.layer.count) == (LAYERS, 0)


def test_the_warm_up_is_not_counted() -> None:
    collector = Collector(2 * SECOND, 1.0)
    collector.add(np.stack([record(1.9, 2.1, 2.2), record(2.1, 2.1, 2.2)]))
    assert (collector.steps, collector.rows, collector.layers) == (1, 3, LAYERS)


def test_shapes_are_counted_apart() -> None:
    collector = Collector(0, 9.0)
    for kind, requests, longest in itertools.product(Kind, (1, 3, 4), (64, 65)):
        fields = {"KIND": kind, "REQUESTS": requests, "LONGEST": longest}
        collector.add(record(1, 1, 2, **fields)[None])
    assert len(collector.shapes) == 3 * 2 * 2
    assert collector.shapes[ShapeKey(Kind.MIXED, 4, 128)].step.count == 2
    assert collector.step.count == 18
    assert sum(point.steps for point in collector.points.values()) == 18


def test_a_histogram_has_three_digits() -> None:
    histogram = Histogram()
    for value in range(1, 10_001):
        histogram.record(value * 1000)
    for nanoseconds in (400, 7_000, 50_000):  # layers on a GPU are no longer
        short = Histogram()
        short.record(nanoseconds)
        assert short.percentile(50) * 1e6 == pytest.approx(nanoseconds, rel=0.001)
    for percentile in (50, 90, 99, 99.9):
        assert histogram.percentile(percentile) == pytest.approx(percentile / 10, rel=0.002)
    histogram.record(10**15)  # beyond its range: at its end, and no error
    assert histogram.times().most == pytest.approx(600_000, rel=0.01)
    assert histogram.times(encoded=True).encoded.startswith("HISTF")


def _samples(**grows: float) -> list[Sample]:
    return [
        Sample(
            float(second),
            100 + grows.get("memory_mib", 0.0) * second,
            12 + int(grows.get("mappings", 0.0) * second),
            40 + int(grows.get("descriptors", 0.0) * second),
            9 + int(grows.get("threads", 0.0) * second),
        )
        for second in range(40)
    ]


def test_what_does_not_grow_passes() -> None:
    assert all(found.ok for found in growth("service", _samples(), Soak()))


@pytest.mark.parametrize(
    ("what", "a_second"),
    [("memory_mib", 1.0), ("mappings", 0.1), ("descriptors", 0.1), ("threads", 0.1)],
)
def test_what_grows_is_named(what: str, a_second: float) -> None:
    found = growth("service", _samples(**{what: a_second}), Soak())
    assert [entry.what for entry in found if not entry.ok] == [what]


def test_a_gpu_whose_memory_grows_is_named() -> None:
    flat = [GpuSample(float(second), 1000.0 + second % 3) for second in range(40)]
    assert all(found.ok for found in growth("GPU 0", flat, Soak()))
    grown = [
        GpuSample(sample.seconds, sample.gpu_memory_mib + 4 * sample.seconds) for sample in flat
    ]
    assert [(found.what, found.ok) for found in growth("GPU 0", grown, Soak())] == [
        ("gpu_memory_mib", False)
    ]


def test_a_peak_is_no_growth() -> None:
    samples = _samples()
    samples[30] = replace(samples[30], mappings=500, descriptors=500)
    assert all(found.ok for found in growth("service", samples, Soak()))


def test_too_few_looks_say_nothing() -> None:
    assert growth("service", _samples()[:7], Soak()) == []


def test_a_look_at_this_process_sees_what_it_holds() -> None:
    before = sample(os.getpid(), 0.0)
    memories = [HostMemory.create(1 << 20, "load test") for _ in range(3)]
    for memory in memories:
        memory.view()[:] = bytes(1 << 20)
    ballast = os.urandom(32 << 20)
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    after = sample(os.getpid(), 1.0)
    idle.set()
    thread.join()
    assert before is not None and after is not None and ballast
    assert after.mappings - before.mappings == 3
    assert after.descriptors - before.descriptors >= 3
    assert after.memory_mib - before.memory_mib > 25
    assert after.threads - before.threads == 1
    for memory in memories:
        memory.close()


def test_a_process_that_cannot_be_looked_at() -> None:
    assert sample(2**22 + 1, 0.0) is None


def _result(limits: dict[str, Any] | None = None, **fields: Any) -> LoadResult:
    workload = Workload(**{"limits": limits or {}, **fields.pop("workload", {})})
    times = Histogram()
    times.record(8_000_000)
    values: dict[str, Any] = {
        "workload": workload,
        "geometry": workload.geometry,
        "service": Service("unix:/x", "1", 1, "cpu", ()),
        "seconds": 10.0,
        "steps": 100,
        "rows": 100,
        "layers": 400,
        "inline_layers": 0,
        "unserved_steps": 0,
        "steps_a_second": 10.0,
        "rows_a_second": 10.0,
        "response": times.times(),
        "step": times.times(),
        "layer": times.times(),
        "forward": Histogram().times(),
        "checked": 8,
    }
    result = LoadResult(**(values | fields))
    result.verdicts = judge(result)
    return result


def _failed(result: LoadResult) -> list[str]:
    return [verdict.name for verdict in result.verdicts if not verdict.ok]


def test_a_good_result_is_ok() -> None:
    limits = {"step_p99_milliseconds": 9, "layer_p99_milliseconds": 9, "steps_a_second": 9}
    result = _result(limits)
    assert result.ok and len(result.verdicts) == 9


def test_without_a_service_nothing_but_inline_layers_is_expected() -> None:
    inline = {"load": {"placement": "inline"}, "soak": {}}
    result = _result(inline_layers=400, checked=0, workload=inline)
    assert result.ok
    assert not _result(inline_layers=400, wrong_answers=1, workload=inline).ok


def test_durations_have_the_unit_that_fits() -> None:
    said = [duration(ms) for ms in (0.0, 0.00825, 0.0123, 0.4567, 8.256, 12.44, 123.4, 61_000)]
    assert said == [
        "0.00 µs", "8.25 µs", "12.3 µs", "457 µs", "8.26 ms", "12.4 ms", "123 ms", "61.0 s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"wrong_answers": 1}, "answers"),
        ({"checked": 0}, "answers"),
        ({"failures": ["session 3: gone"]}, "sessions"),
        ({"steps": 0}, "steps"),
        ({"faulted_rows": 1}, "inputs"),
        ({"rejected_steps": 1}, "inputs"),
        ({"inline_layers": 1}, "inline_share"),
        ({"unserved_steps": 1}, "unserved_steps"),
        ({"inline_layers": 1, "workload": {"load": {"placement": "mps"}}}, "inline_share"),
        ({"limits": {"step_p50_milliseconds": 7}}, "step_p50_milliseconds"),
        ({"limits": {"step_p99_milliseconds": 7}}, "step_p99_milliseconds"),
        ({"limits": {"layer_p99_milliseconds": 7}}, "layer_p99_milliseconds"),
        ({"limits": {"steps_a_second": 11}}, "steps_a_second"),
        ({"workload": {"soak": {}}}, "soak: service"),
        (
            {
                "workload": {"soak": {}},
                "samples": {"service": _samples(mappings=1)},
                "growths": growth("service", _samples(mappings=1), Soak()),
            },
            "soak: service, mappings",
        ),
        (
            {"workload": {"soak": {}}, "samples": {"service": _samples()[:3]}},
            "soak: service",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_each_thing_that_must_hold_can_fail(fields: dict[str, Any], name: str) -> None:
    result = _result(**fields)
    assert not result.ok
    assert _failed(result) == [name]
