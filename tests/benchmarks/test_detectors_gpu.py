"""What the cost of detectors on a GPU is computed from; it is measured elsewhere."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")


@pytest.fixture
def program(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("detectors_gpu")


def test_what_a_way_adds_is_compared_within_turns(program: ModuleType) -> None:
    """The machine gets slower from turn to turn, the way costs 2 µs in each."""
    off = [100.0 + 10 * turn for turn in range(11)]
    steps = {"off": off, "all": [one + 2 for one in off]}
    found = program.compare(steps, {"off": [5.0] * 11, "all": [6.0] * 11})
    assert found["off"]["added_percent"] == 0
    assert found["all"]["added_percent"] == pytest.approx(100 * 2 / 150)
    assert found["all"]["begin_step_us"] == 6
    assert "added_percent" not in program.compare({"all": [1.0]}, {"all": [1.0]})["all"]


def test_both_sides_of_a_way_have_its_settings(program: ModuleType, tmp_path: Path) -> None:
    from indexer_client import ClientSettings
    from indexer_service.settings import Settings

    seen = {}
    for way in (*program.WAYS, "generations"):
        given = program.settings_of(way, tmp_path)
        for settings in (ClientSettings(address="unix:/n", **given), Settings(**given)):
            traced = settings.trace_ratio if settings.trace_file is not None else 0
            seen.setdefault(way, set()).add((settings.detectors, traced))
    assert seen == {
        "off": {("none", 0)},
        "all": {("all", 0)},
        "traced": {("none", 0.01)},
        "all, traced": {("all", 0.01)},
        "generations": {("generations", 0)},
    }


class _Indexer:
    def __init__(self, geometry: Any, caches: Any, *, device: Any, settings: Any) -> None:
        self.detectors = settings.detectors
        self.answered = 0
        self.is_closed = False

    def start(self) -> None:
        pass

    def wait_attached(self, seconds: float) -> None:
        if self.detectors == "all":
            raise RuntimeError("no answer")

    @property
    def statistics(self) -> Any:
        return SimpleNamespace(answered_layers=self.answered)

    def close(self) -> None:
        self.is_closed = True


def test_a_session_or_a_shape_that_fails_costs_the_others_nothing(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    made: list[_Indexer] = []

    class Decode:
        def __init__(self, work: Any, indexer: Any, requests: int, *_: Any) -> None:
            if requests == 8:
                raise RuntimeError("out of memory")
            table = torch.zeros((requests, 2), dtype=torch.int32)
            lengths = torch.full((requests,), 70, dtype=torch.int32)
            self.indexer = indexer
            made.append(indexer)
            self.inputs = SimpleNamespace(seq_lens=lengths, block_table=table)

    def step(decode: Any) -> tuple[float, float]:
        decode.indexer.answered += len(program.GEOMETRY.layers)
        assert decode.inputs.positions.tolist() == [69]
        assert decode.inputs.slots.tolist() == [5]
        return 100.0, 5.0

    work = SimpleNamespace(device=None, k_caches={}, change=lambda turn, rows: None)
    monkeypatch.setattr(program, "Work", SimpleNamespace(make=lambda device: work))
    monkeypatch.setattr(program, "DeviceIndexer", _Indexer)
    monkeypatch.setattr(program, "Decode", Decode)
    monkeypatch.setattr(program, "_step", step)
    monkeypatch.setattr(
        program, "replace", lambda old, **new: SimpleNamespace(**{**vars(old), **new})
    )
    for name in ("set_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    addresses = {way: f"unix:/{way}" for way in ("off", "all", "traced")}
    found = program.worker(addresses, tmp_path, 100.0)
    assert set(found["failed"]) == {"all", "8 x 65536"}
    assert found["failed"]["all"] == "RuntimeError: no answer"
    (one,) = found["shapes"].values()
    assert one["answered"]
    assert set(one["ways"]) == {"off", "traced"}
    assert one["ways"]["off"]["steps"] == program.ROUNDS
    assert all(indexer.is_closed for indexer in made)
    late = program.worker(addresses, tmp_path, -1.0)
    assert not late["shapes"]
    assert late["failed"]["1 x 4096"] == "no time left of -1 s"
    program.show(found)


def test_a_service_that_does_not_come_up_is_named(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    @contextmanager
    def service(folder: Path, device: int, environment: dict[str, str]) -> Iterator[str]:
        if environment["DSA_INDEXER_DETECTORS"] == "all":
            raise RuntimeError("the service does not serve")
        yield f"unix:{folder}"

    def run(command: list[str], **_: Any) -> Any:
        asked.append(json.loads(command[-1])["addresses"])
        said = json.dumps({"shapes": {"1 x 1": {}}, "failed": {}})
        return subprocess.CompletedProcess(command, 0, stdout=f"noise\n{said}\n")

    monkeypatch.setattr(program, "service", service)
    monkeypatch.setattr(program.subprocess, "run", run)
    found = program.measure(program.WAYS, tmp_path, {}, 50.0)
    assert found["failed"] == {
        "all": "the service does not serve",
        "all, traced": "the service does not serve",
    }
    assert [set(addresses) for addresses in asked] == [{"off", "traced"}]
    assert found["shapes"]


def test_a_worker_that_dies_loses_no_more_than_its_own(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def service(folder: Path, device: int, environment: dict[str, str]) -> Iterator[str]:
        yield f"unix:{folder}"

    def run(command: list[str], **_: Any) -> Any:
        raise subprocess.CalledProcessError(-9, command)

    monkeypatch.setattr(program, "service", service)
    monkeypatch.setattr(program.subprocess, "run", run)
    found = program.measure(("off",), tmp_path, {}, 50.0)
    assert not found["shapes"]
    assert "CalledProcessError" in found["failed"]["worker"]


def test_results_become_a_table(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documents = sys.modules["race_documents"]
    page = tmp_path / "page.md"
    page.write_text("<!-- detectors gpu: begin -->\n<!-- detectors gpu: end -->\n")
    monkeypatch.setattr(documents, "DIAGNOSING", page)
    ways = program.compare(
        {"off": [100.0, 100.0], "all": [101.0, 101.0]}, {"off": [5.0], "all": [6.0]}
    )
    found = {"shapes": {"1 x 4096": {"answered": True, "ways": ways}}, "failed": {"traced": "why"}}
    monkeypatch.setattr(documents, "read", lambda path: {"results": found})
    monkeypatch.setattr(documents, "origin", lambda record, path: "origin")
    documents.detectors_gpu(tmp_path / "results.json")
    text = page.read_text()
    assert "| 1 x 4096 | `all` | 101 | +1.00 % | 6 | all |" in text
    assert "Not measured: traced: why" in text
