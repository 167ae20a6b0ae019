"""Puts what a results file says between two marks of a document."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"


def read(results: Path) -> dict[str, Any]:
    """The record that `results_file.write` wrote."""
    record: dict[str, Any] = json.loads(results.read_text())
    return record


def origin(record: dict[str, Any], results: Path) -> str:
    """Card, date, versions and source, in the words of every section."""
    versions = ", ".join(
        f"{name} {number}"
        for name, number in record["versions"].items()
        if number != "not installed"
    )
    file = results.resolve()
    source = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
    return f"{record['device']}, {record['date'][:10]}, {versions}. Source: `{source}`."


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table, cells as they print."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def put(document: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = document.read_text().split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
