"""Results of a benchmark that runs in parts, and of the tests that need a GPU."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def program(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    module = importlib.import_module("results_file")
    monkeypatch.setattr(module, "_COMMIT", "abc")
    return module


def write(program: ModuleType, folder: Path, results: dict[str, Any], **more: Any) -> Any:
    path = program.write("card", more.pop("device", "Card"), results, folder=folder, **more)
    return json.loads(path.read_text())["results"]


def test_a_part_keeps_what_others_have_measured(program: ModuleType, tmp_path: Path) -> None:
    write(program, tmp_path, {"mps": 1, "inline": 1}, combine=program.by_name)
    found = write(program, tmp_path, {"mps": 2, "peer_gpu": 2}, combine=program.by_name)
    assert found == {"mps": 2, "inline": 1, "peer_gpu": 2}
    assert write(program, tmp_path, {"mps": 3}) == {"mps": 3}


def test_rows_of_a_part_replace_those_of_the_same_key(program: ModuleType, tmp_path: Path) -> None:
    combine = program.by_key("rows", "form")
    first = {"rate": 1, "rows": [{"form": "a", "n": 1}, {"form": "a", "n": 2}, {"form": "b"}]}
    write(program, tmp_path, first, combine=combine)
    found = write(program, tmp_path, {"rate": 2, "rows": [{"form": "a", "n": 3}]}, combine=combine)
    assert found == {"rate": 2, "rows": [{"form": "b"}, {"form": "a", "n": 3}]}


@pytest.mark.parametrize("changed", ["device", "commit", "versions"])
def test_parts_of_another_card_or_code_are_not_mixed(
    changed: str, program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(program, tmp_path, {"mps": 1}, combine=program.by_name)
    more: dict[str, Any] = {}
    if changed == "device":
        more["device"] = "Other"
    elif changed == "commit":
        monkeypatch.setattr(program, "_COMMIT", "abc+")
    else:
        monkeypatch.setattr(program, "installed", lambda package: "9")
    assert write(program, tmp_path, {"inline": 1}, combine=program.by_name, **more) == {"inline": 1}


def test_the_commit_says_whether_code_was_changed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    program = importlib.import_module("results_file")
    said = {"rev-parse": "abc", "status": ""}
    monkeypatch.setattr(program, "_git", lambda name, *_: said[name])
    assert program.commit() == "abc"
    said["status"] = " M attention_worker/streams.py"
    assert program.commit() == "abc+"
    said["rev-parse"] = ""
    assert program.commit() == ""


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Fake GPU", "fake-gpu"),
    ],
)
def test_a_file_begins_with_its_card(program: ModuleType, device: str, name: str) -> None:
    assert program.card(device) == name


REPORT = """<testsuites><testsuite>
<testcase name="good"/>
<testcase name="bad"><failure message="no">trace</failure></testcase>
<testcase name="broken"><error message="no">trace</error></testcase>
<testcase name="left out"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_of_a_test_file(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    gpu_tests = importlib.import_module("gpu_tests")
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert gpu_tests.outcome(report) == {
        "passed": 1,
        "failed": ["bad", "broken"],
        "skipped": 1,
        "skipped because": ["needs two GPUs"],
    }
    report.write_text("<testsuites><testsuite/></testsuites>")
    assert gpu_tests.outcome(report)["failed"], "a file in which nothing was to be run"
    assert "tests/load/test_load_gpu.py" in gpu_tests.files_with_gpu_tests()


def test_a_test_file_that_crashes_is_told_of(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    file = tmp_path / "test_crash.py"
    file.write_text("import os\nos.abort()\n")
    found = importlib.import_module("gpu_tests").run(str(file))
    assert found["passed"] == 0 and found["failed"]
    assert "Fatal Python error" in capsys.readouterr().out
