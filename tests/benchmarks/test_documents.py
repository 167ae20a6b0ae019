"""Pages have the marks between which benchmarks put what they measured."""

from pathlib import Path

import pytest

MARKS = {
    "diagnosing-races.md": (
        "race-lab cpu",
        "race-lab cuda",
        "detectors cpu",
        "detectors gpu",
        "detector pieces",
    ),
    "handoff.md": ("handoff_gpu",),
    "load.md": ("gpu-runs", "soaks"),
    "performance.md": ("indexer_kernels", "sparse_mla"),
}


@pytest.mark.parametrize("page", MARKS)
def test_a_page_has_every_mark_once(page: str, repository: Path) -> None:
    text = (repository / "docs" / page).read_text()
    for name in MARKS[page]:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        assert text.count(begin) == text.count(end) == 1, name
        assert text.index(begin) < text.index(end)


def test_every_results_file_is_named_by_a_page_or_the_list_of_runs(repository: Path) -> None:
    pages = "\n".join(page.read_text() for page in (repository / "docs").rglob("*.md"))
    for file in sorted((repository / "benchmarks" / "results").glob("*.json")):
        assert file.name in pages, f"{file.name} (fix: name it, or put it into a page)"
