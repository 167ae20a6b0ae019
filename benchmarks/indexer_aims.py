"""What was aimed at on an H200, and what a results file reached."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from documents import markdown_table
from indexer_rows import in_one_graph, medians, summed

Results = dict[str, Any]
Peer = Callable[[dict[str, Any]], float | None]

SUMMED = "× DeepGEMM and best top-k summed"
GRAPH = "× the two in one graph"


@dataclass(frozen=True)
class Aim:
    """A value of the results, and its bounds: at most, or at least, `reach`; `beyond`, if any."""

    work: str
    value: Callable[[Results], float | None]
    reach: float
    beyond: float | None
    unit: str
    at_least: bool = False

    def met(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound

    def cells(self, value: float) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        verdict = "reached" if self.met(value, self.reach) else "**missed**"
        if self.beyond is not None and self.met(value, self.beyond):
            verdict += ", and beyond"
        bounds = [
            "" if bound is None else f"{sign} {bound:g}" for bound in (self.reach, self.beyond)
        ]
        return [self.work, self.unit, *bounds, _short(value), verdict]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _against(peer: Peer, name: str, *, large: bool = False) -> Callable[[Results], float | None]:
    """The worst ratio of one of ours to the peer, over all shapes or those of 8 rows of 64k."""

    def worst(results: Results) -> float | None:
        ratios = []
        for row in results.get("decode", ()):
            ours, theirs = medians(row).get(name), peer(row)
            if ours and theirs and (not large or (row["B"] >= 8 and row["context"] >= 1 << 16)):
                ratios.append(ours / theirs)
        return max(ratios, default=None)

    return worst


def _of(results: Results, section: str, shape: dict[str, int]) -> dict[str, Any] | None:
    for row in results.get(section, ()):
        if all(row[name] == size for name, size in shape.items()):
            return dict(row)
    return None


def _rate(results: Results, name: str) -> float | None:
    row = _of(results, "scores", {"H": 64, "rows": 4096, "keys": 65536})
    return row["TFLOP/s"].get(name) if row else None


def _topk(results: Results) -> float | None:
    row = _of(results, "topk", {"rows": 4096, "keys": 65536})
    return medians(row).get("ours") if row else None


def _longer(results: Results) -> float | None:
    row = _of(results, "captured", {"B": 1, "context": 4096})
    times = medians(row) if row else {}
    own, long = times.get("select fp8, own"), times.get("select fp8, long")
    return long / own if own and long else None


AIMS = (
    Aim("`select_paged`, fp8, worst shape", _against(summed, "select fp8"), 1.0, None, SUMMED),
    Aim("the same", _against(in_one_graph, "select fp8"), 1.0, None, GRAPH),
    Aim("8 and more rows of 64k and more, fp8, worst", _against(summed, "select fp8", large=True),
        1.0, 0.85, SUMMED),
    Aim("the same", _against(in_one_graph, "select fp8", large=True), 1.0, 0.85, GRAPH),
    Aim("`select_paged`, SM80 form, worst shape", _against(summed, "select sm80"),
        1.6, 1.2, SUMMED),
    Aim("the same", _against(in_one_graph, "select sm80"), 1.6, 1.2, GRAPH),
    Aim("ragged logits 4096 × 65536, 64 heads, fp8", lambda r: _rate(r, "fp8"),
        700, 994, "TFLOP/s", at_least=True),
    Aim("the same, SM80 form", lambda r: _rate(r, "sm80"), 350, None, "TFLOP/s", at_least=True),
    Aim("top-k of 4096 × 65536", _topk, 652, 326, "µs"),
    Aim("captured for 1 M, one row of 4k", _longer, 1.15, 1.0, "× captured for 4k"),
)  # fmt: skip


def aims(results: Results) -> str:
    """A table of those that the results say something about, empty without any."""
    reached = [(aim, aim.value(results)) for aim in AIMS]
    cells = [aim.cells(value) for aim, value in reached if value is not None]
    head = ("work", "in", "aim", "beyond", "reached", "")
    return f"Against what was aimed at:\n\n{markdown_table(head, cells)}" if cells else ""
