"""Short tables of what the vLLM comparison found."""

from typing import Any

_WIDTH = 24


def table(phase: str, found: dict[str, dict[str, Any]]) -> str:
    """A line a case, a column for each of what was measured."""
    lines = [f"== {phase}"]
    for name, each in found.items():
        if "failed" in each:
            cells = [f"failed: {str(each['failed']).strip().splitlines()[-1][-120:]}"]
        else:
            cells = [cell for cell in _cells(each) if cell]
        lines.append(f"{name:{_WIDTH}} " + "  ".join(cells))
    return "\n".join(lines)


def _cells(each: dict[str, Any]) -> list[str]:
    cells = [f"start {each['start_seconds']} s, {each['blocks']} blocks"]
    for row, kinds in each.get("milliseconds", {}).items():
        cells.append(f"[{row}] " + " ".join(f"{kind} {ms}" for kind, ms in kinds.items()))
    for name in ("log-probability difference", "overlap", "attention error", "attached again"):
        if name in each:
            cells.append(f"{name} {each[name]}")
    for rank, sessions in enumerate(each.get("statistics", [])):
        cells += [
            f"rank {rank}: {counts['placement']}, answered {counts['answered_layers']}, "
            f"inline {counts['inline_layers']}, detached {counts['detachments']}"
            for counts in sessions
        ]
    return cells
