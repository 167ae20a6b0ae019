"""The GPU benchmark's script, rehearsed on a CPU with tiny shapes; its tables and figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path("benchmarks") / "indexer_kernels.py"
MARKS = "<!-- indexer_kernels: begin -->\n<!-- indexer_kernels: end -->"


def run(repository: Path, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def results(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a rehearsal wrote."""
    folder = tmp_path_factory.mktemp("results")
    said = run(repository, "--dry", "--results", str(folder))
    assert "all of ours right" in said
    (file,) = folder.iterdir()
    return file


def test_a_rehearsal_measures_every_section(results: Path) -> None:
    measured = json.loads(results.read_text())["results"]
    assert measured["failed"] == []
    for section in ("decode", "captured", "scores", "topk", "select", "insert", "gather", "drafts"):
        for row in measured[section]:
            assert row["wrong"] == {}
            assert all(least <= mid <= most for mid, least, most in row["µs"].values())
    first = measured["decode"][0]
    assert {"select fp8", "select sm80", "logits fp8", "logits sm80", "top-k"} <= first["µs"].keys()
    assert first["checks"]["select fp8: float64's choice"] == 1.0


def test_documents_have_tables_and_figures(repository: Path, results: Path, tmp_path: Path) -> None:
    """Peers' times are put in by hand: this machine has none."""
    record = json.loads(results.read_text())
    times = record["results"]["decode"][0]["µs"]
    times |= {"select fp8": [8.0, 7, 9], "DeepGEMM logits": [4.0, 4, 4], "persistent": [5.0, 5, 5]}
    times |= {"DeepGEMM + persistent": [10.0, 10, 10], "DeepGEMM + per row": [12.0, 12, 12]}
    del record["results"]["decode"][1]["µs"]["select fp8"]
    results = tmp_path / "results.json"
    results.write_text(json.dumps(record))
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{MARKS}\nafter\n")
    drawn = set()
    for _ in range(2):  # a second time replaces the first, by the same
        run(repository, "--document", str(results), "--into", str(document))
        text = document.read_text()
        drawn.add((tmp_path / "figures" / "indexer_select_b1.svg").read_bytes())
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert text.count("indexer.select_paged") == 1
    assert "| 4 | 1 | 1 | 64 | **8.0** |" in text
    assert "10.0 (persistent) | 9.0 | 0.80 | 0.89 |" in text
    assert "summed | ≤ 1 |  | 0.89 | 1 of 4 | **missed**: nothing of ours for 1 |" in text
    assert "other shapes, SM80 form, worst | × DeepGEMM and best top-k summed | ≤ 1.6 |" in text
    assert "8 and more requests" not in text, "there are no such"
    assert "figures/indexer_select_b1.svg" in text
    (figure,) = drawn
    assert b"byte floor" in figure and len(figure) < 60_000


def test_a_section_is_that_of_the_first_file_that_has_it(
    repository: Path, results: Path, tmp_path: Path
) -> None:
    record = json.loads(results.read_text())
    record["results"]["decode"][0]["µs"]["select fp8"] = [8.0, 7, 9]
    newer = {name: record["results"][name] for name in ("copy B/s", "decode")}
    newer |= {"scores": [], "failed": ["interrupted"]}
    first = tmp_path / "newer.json"
    first.write_text(json.dumps({**record, "results": newer}))
    document = tmp_path / "performance.md"
    document.write_text(MARKS)
    run(repository, "--document", str(first), str(results), "--into", str(document))
    text = document.read_text()
    assert "`newer.json`. From there: decode." in text
    assert "From there: captured, scores, topk, select, insert, gather, drafts." in text
    assert "| 4 | 1 | 1 | 64 | **8.0** |" in text
    assert "interrupted" not in text


def test_the_performance_document_is_that_of_its_results_file(
    repository: Path, tmp_path: Path
) -> None:
    committed = repository / "docs" / "performance.md"
    inside = committed.read_text().split("<!-- indexer_kernels: begin -->")[1]
    sources = re.findall(r"Source: `(.*?)`", inside.split("<!-- indexer_kernels: end -->")[0])
    assert sources, "no results file is in the document"
    copy = tmp_path / "performance.md"
    copy.write_text(committed.read_text())
    files = [str(repository / source) for source in sources]
    run(repository, "--document", *files, "--into", str(copy))
    assert copy.read_text() == committed.read_text()
