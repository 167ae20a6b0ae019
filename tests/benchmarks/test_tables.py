"""Tables in the documents are what the results files that they name say."""

import re
from pathlib import Path

import pytest

from tests.benchmarks.conftest import Program


@pytest.mark.parametrize(
    ("module", "function", "constant", "mark"),
    [
        ("handoff_documents", "document", "HANDOFF", "handoff_gpu"),
        ("race_documents", "race_lab", "DIAGNOSING", "race-lab cpu"),
        ("race_documents", "detectors_cpu", "DIAGNOSING", "detectors cpu"),
        ("race_documents", "detector_pieces", "DIAGNOSING", "detector pieces"),
        ("sparse_mla", "document", "PERFORMANCE", "sparse_mla"),
    ],
)
def test_a_table_is_that_of_its_results_file(
    module: str,
    function: str,
    constant: str,
    mark: str,
    program: Program,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = program(module)
    committed = getattr(writer, constant).read_text()
    inside = committed.split(f"<!-- {mark}: begin -->")[1].split(f"<!-- {mark}: end -->")[0]
    (source,) = re.findall(r"Source: `(.*?)`", inside)
    copy = tmp_path / "document.md"
    copy.write_text(committed.replace(inside, "\n\n"))
    monkeypatch.setattr(writer, constant, copy)
    monkeypatch.setattr(writer, "FIGURE", tmp_path / "figure.svg", raising=False)
    getattr(writer, function)(repository / source)
    assert copy.read_text() == committed
