"""Load tests of services that are well, wrong, slow, leaking, full, gone, or not for them."""

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_indexer_cli.load.recorded import read_recording
from dsa_indexer_cli.load.result import LoadResult
from dsa_indexer_cli.load.run import Progress, Tell, run_sessions
from dsa_indexer_cli.load.summary import summarise
from dsa_indexer_cli.load.workload import WorkloadError, load_workload
from indexer_client import ClientSettings, IndexerError, Session
from indexer_service.engine import EngineSettings, LayerInputs
from indexer_service.engines.cpu import CpuEngine
from indexer_service.settings import Settings
from tests.service.support import LocalService, running
from tests.support.workloads import Checker, RandomSteps, Shape

# A machine with other work must not look like a service that does not answer.
PATIENT = {"load.wait_bound_seconds": 30.0, "load.warm_up_seconds": 0.2}
CLOSED = {**PATIENT, "load.mode": "closed", "load.sessions": 2, "check.share": 1.0}

Plant = Callable[[torch.Tensor], None]


class PlantedEngine(CpuEngine):
    """The CPU engine, with something done to each answer."""

    def __init__(self, plant: Plant) -> None:
        super().__init__(EngineSettings(workspace_bytes=1 << 24, cpu_threads=1))
        self._plant = plant

    def warm_up(self) -> None:
        """Its proof would find the plant."""

    def select(
        self, inputs: LayerInputs, top_k: int, out: torch.Tensor, on_stage: Callable[[str], None]
    ) -> None:
        super().select(inputs, top_k, out, on_stage)
        self._plant(out)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalService]]:
    """Starts a service in this process, with a plant or without."""
    stops: list[Any] = []

    def start(plant: Plant | None = None, **settings: Any) -> LocalService:
        engine = {} if plant is None else {"engine": PlantedEngine(plant)}
        address = f"unix:{tmp_path}/d/i.sock"
        service = running(Settings(address=address, gate_bound_seconds=30, **settings), **engine)
        stops.append(service)
        return service.__enter__()

    yield start
    for service in stops:
        service.__exit__(None, None, None)


def load(
    address: str,
    changes: dict[str, Any],
    seconds: float,
    stop: threading.Event | None = None,
    tell: Tell = lambda _: None,
) -> LoadResult:
    """A load test with sessions in processes of their own."""
    workload = load_workload("smoke", {**changes, "load.seconds": seconds})
    finished = run_sessions(workload, address, tell, stop or threading.Event())
    return summarise(workload, finished)


def load_until(
    address: str, changes: dict[str, Any], *, steps: int, seconds: float = 0.0
) -> LoadResult:
    """A load test that goes on until so much has come about, however long that takes."""
    stop = threading.Event()

    def end_it(progress: Progress) -> None:
        if progress.steps >= steps and progress.seconds >= seconds:
            stop.set()

    return load(address, changes, 300.0, stop, end_it)


def failed(result: LoadResult) -> list[str]:
    return [verdict.name for verdict in result.verdicts if not verdict.ok]


def test_a_closed_loop_against_a_service_that_is_well(
    start: Callable[..., LocalService],
) -> None:
    changes = {**CLOSED, "load.reopen_seconds": 0.4}
    result = load_until(start().address, changes, steps=10, seconds=1.0)
    assert result.ok, result.verdicts
    assert result.checked >= result.steps > 2  # those of the warm-up are compared too
    assert result.layers == 2 * result.steps
    assert result.reopened >= 1
    assert result.step.count == result.response.count == result.steps
    assert sum(shape.steps for shape in result.shapes) == result.steps


def test_a_wrong_answer_is_found(start: Callable[..., LocalService]) -> None:
    """Every index is right, but for one in every fourth answer."""
    asked = []

    def plant(out: torch.Tensor) -> None:
        asked.append(len(out))
        if len(asked) % 4 == 0:
            out[0, 0] += 1

    result = load_until(start(plant).address, {**CLOSED, "load.sessions": 1}, steps=10)
    assert failed(result) == ["answers"]
    assert result.wrong_answers > 0 and "instead of" in result.wrong[0]


def test_a_service_that_is_too_slow_misses_limits_and_arrivals(
    start: Callable[..., LocalService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps a second arrive, and each takes a fifth of one: the queue grows."""
    service = start(lambda _: time.sleep(0.1))
    changes = {
        **PATIENT,
        "load.sessions": 1,
        "load.rate": 10.0,
        "load.arrivals": "constant",
        "limits": {"step_p99_milliseconds": 500.0, "steps_a_second": 9.0},
    }
    result = load(service.address, changes, 1.2)
    assert {"step_p99_milliseconds", "steps_a_second"} <= set(failed(result))
    assert result.response.p99 > 2 * result.step.p99


def test_a_leak_fails_a_soak(start: Callable[..., LocalService]) -> None:
    """The service runs in this process, and keeps a mapped memory for each selection."""
    kept: list[tuple[int, mmap.mmap]] = []

    def plant(_: torch.Tensor) -> None:
        descriptor = os.memfd_create("dsa-indexer:leak")
        os.ftruncate(descriptor, 4096)
        kept.append((descriptor, mmap.mmap(descriptor, 4096)))

    soak = {**CLOSED, "load.sessions": 1, "check.share": 0.1, "soak.sample_seconds": 0.1}
    try:
        result = load_until(start(plant).address, soak, steps=20, seconds=3.0)
    finally:
        for descriptor, memory in kept:
            memory.close()
            os.close(descriptor)
    assert {"soak: service, mappings", "soak: service, descriptors"} <= set(failed(result))
    assert not any("session" in name for name in failed(result))


def test_a_service_that_is_full_fails_a_session(start: Callable[..., LocalService]) -> None:
    result = load(start(max_sessions=1).address, {**CLOSED, "load.attach_seconds": 1.0}, 0.3)
    assert "sessions" in failed(result)
    assert len(result.failures) == 1 and "max_sessions" in result.failures[0]


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(IndexerError):
        load(f"unix:{tmp_path}/nobody.sock", CLOSED, 1.0)


def test_without_a_service_all_is_inline(tmp_path: Path) -> None:
    """Nobody listens at the address, and nobody is asked."""
    inline = {**CLOSED, "load.sessions": 1, "load.placement": "inline"}
    result = load_until(f"unix:{tmp_path}/nobody.sock", inline, steps=1)
    assert result.ok, result.verdicts
    assert result.inline_layers == result.layers > 0
    assert (result.service.placement, result.service.address) == ("inline", "")


def test_it_can_be_ended_early(start: Callable[..., LocalService]) -> None:
    stop = threading.Event()

    def end_it(progress: Progress) -> None:
        if progress.steps:
            stop.set()

    began = time.monotonic()
    result = load(start().address, CLOSED, 300.0, stop, end_it)
    assert time.monotonic() - began < 60
    assert result.ok and result.steps


def _record(folder: Path, steps: int) -> tuple[Path, list[tuple[int, ...]]]:
    """A recording of random steps, and which layers each asked."""
    work, checker, asked = RandomSteps(Shape.random(3), 3), Checker(), []
    file = folder / "record.jsonl"
    settings = ClientSettings(placement="inline", record=file)
    with Session(work.geometry, work.k_caches, work.fallback, settings=settings) as session:
        for number in range(steps):
            case = work.case(number, all_layers=False)
            asked.append(case.layers)
            with session.step(case.inputs, case.layers) as step:
                checker.run(step, case)
    checker.assert_right()
    work.close()
    return file, asked


def test_a_recording_is_replayed_as_it_was(
    start: Callable[..., LocalService], tmp_path: Path
) -> None:
    file, asked = _record(tmp_path, 12)
    recording = read_recording(file)
    assert [shape.layers for shape in recording.shapes] == asked
    assert list(recording.seconds) == sorted(recording.seconds)
    changes = {
        **PATIENT,
        "load.warm_up_seconds": 0.0,
        "load.mode": "recorded",
        "load.sessions": 1,
        "check.share": 1.0,
        "replay.file": str(file),
    }
    result = load_until(start().address, changes, steps=12)
    assert result.ok, result.verdicts
    assert result.steps == 12
    assert result.layers == sum(map(len, asked))
    assert result.geometry == RandomSteps(Shape.random(3), 3).geometry


def test_a_recording_holds_shapes_and_nothing_else(tmp_path: Path) -> None:
    file, _ = _record(tmp_path, 3)
    header, *steps = map(json.loads, file.read_text().splitlines())
    assert set(header) == {"version", "geometry"}
    allowed = {
        "seconds",
        "rows",
        "requests",
        "decode_requests",
        "rows_per_decode",
        "max_length",
        "layers",
        "seq_lens",
        "query_start",
    }
    assert all(set(step) <= allowed for step in steps)


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    first, _ = _record(tmp_path, 2)
    before = first.read_text()
    _record(tmp_path, 1)
    assert first.read_text() == before
    assert len((tmp_path / "record.jsonl.1").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "text", ["", "{}\n", "nonsense\n", '{"version": 9, "geometry": {}}\n'], ids=range(4)
)
def test_what_is_no_recording(text: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=r"replay.file.*\(fix: "):
        read_recording(file)


def test_a_recording_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    work = RandomSteps(Shape(), 1)
    settings = ClientSettings(record=tmp_path / "nowhere" / "r.jsonl")
    with pytest.raises(ValueError, match=r"record: .*\(fix: "):
        Session(work.geometry, work.k_caches, work.fallback, settings=settings)
    work.close()
