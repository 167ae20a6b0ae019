"""What was aimed at on an H200, and what a results file reached."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from documents import markdown_table
from indexer_rows import best_is_right, decode_rows, in_one_graph, medians, summed

Results = dict[str, Any]
Peer = Callable[[dict[str, Any]], float | None]

SUMMED = "× DeepGEMM and best top-k summed"
GRAPH = "× the two in one graph"

ALONE = -1.0
"""Where ours was measured and there is nothing to compare it with."""

Values = Iterator[float | None]
"""One for each shape that the results have: None where ours is missing, ALONE without a peer."""


@dataclass(frozen=True)
class Aim:
    """Values of the results, and bounds of the worst: at most, or at least, `reach`; `beyond`, if
    any."""

    work: str
    values: Callable[[Results], Values]
    reach: float
    beyond: float | None
    unit: str
    at_least: bool = False
    doubtful: Callable[[Results], int] = lambda results: 0
    """Shapes in which the peer chose wrong keys, so that its time says little."""

    def cells(self, results: Results) -> list[str]:
        """A line of the table, empty if the results have no such shape."""
        values = list(self.values(results))
        if not values:
            return []
        compared = [value for value in values if value is not None and value != ALONE]
        worst = (min if self.at_least else max)(compared, default=None)
        missing = values.count(None)
        sign = "≥" if self.at_least else "≤"
        bounds = ["" if b is None else f"{sign} {b:g}" for b in (self.reach, self.beyond)]
        shapes = f"{len(compared)} of {len(values)}"
        reached = "" if worst is None else _short(worst)
        return [
            self.work,
            self.unit,
            *bounds,
            reached,
            shapes,
            self._verdict(worst, missing, self.doubtful(results)),
        ]

    def _verdict(self, worst: float | None, missing: int, doubtful: int) -> str:
        if missing:
            return f"**missed**: nothing of ours for {missing}"
        if worst is None:
            return "no peer"
        if not self._met(worst, self.reach):
            return "**missed**"
        if doubtful:
            return f"**open**: the peer chose wrongly in {doubtful}"
        beyond = self.beyond is not None and self._met(worst, self.beyond)
        return "reached, and beyond" if beyond else "reached"

    def _met(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


AIMED = {
    (64, 1, 1, 4096), (64, 1, 1, 65_536), (64, 8, 1, 65_536), (64, 32, 1, 65_536),
    (64, 64, 1, 65_536), (64, 1, 1, 131_072), (64, 1, 1, 1 << 20), (64, 64, 1, 4096),
    (32, 64, 1, 65_536),
}  # fmt: skip
"""Heads, requests, next_n and context of the shapes that times were aimed at."""


def _shape(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["H"], row["B"], row["next_n"], row["context"]


def _aimed(row: dict[str, Any]) -> bool:
    return _shape(row) in AIMED


def _large(row: dict[str, Any]) -> bool:
    return _aimed(row) and row["B"] >= 8 and row["context"] >= 1 << 16


def _others(row: dict[str, Any]) -> bool:
    return not _aimed(row)


def _against(
    peer: Peer, name: str, which: Callable[[dict[str, Any]], bool] = _aimed
) -> Callable[[Results], Values]:
    """Ratios of one of ours to the peer, over some of the shapes."""

    def values(results: Results) -> Values:
        for row in decode_rows(results):
            if which(row):
                ours, theirs = medians(row).get(name), peer(row)
                yield ours / theirs if ours and theirs else (ALONE if ours else None)

    return values


def _wrong_peers(which: Callable[[dict[str, Any]], bool] = _aimed) -> Callable[[Results], int]:
    def count(results: Results) -> int:
        return sum(which(row) and not best_is_right(row) for row in decode_rows(results))

    return count


def _named(section: str, shape: dict[str, int], value: Peer) -> Callable[[Results], Values]:
    """A value of the one row of this shape."""

    def values(results: Results) -> Values:
        for row in results.get(section, ()):
            if all(row[name] == size for name, size in shape.items()):
                yield value(row)

    return values


def _longer(row: dict[str, Any]) -> float | None:
    own, long = (medians(row).get(f"select fp8, {kind}") for kind in ("own", "long"))
    return long / own if own and long else None


_SCORES = {"H": 64, "rows": 4096, "keys": 65536}
AIMS = (
    Aim("`select_paged`, fp8, worst of nine shapes", _against(summed, "select fp8"),
        1.0, None, SUMMED, doubtful=_wrong_peers()),
    Aim("the same", _against(in_one_graph, "select fp8"), 1.0, None, GRAPH,
        doubtful=_wrong_peers()),
    Aim("those with 8 and more requests of 64k, worst",
        _against(summed, "select fp8", _large), 1.0, 0.85, SUMMED, doubtful=_wrong_peers(_large)),
    Aim("the same", _against(in_one_graph, "select fp8", _large), 1.0, 0.85, GRAPH,
        doubtful=_wrong_peers(_large)),
    Aim("the nine, SM80 form, worst", _against(summed, "select sm80"), 1.6, 1.2, SUMMED,
        doubtful=_wrong_peers()),
    Aim("the same", _against(in_one_graph, "select sm80"), 1.6, 1.2, GRAPH,
        doubtful=_wrong_peers()),
    Aim("other shapes, fp8, worst", _against(summed, "select fp8", _others), 1.0, None, SUMMED,
        doubtful=_wrong_peers(_others)),
    Aim("other shapes, SM80 form, worst", _against(summed, "select sm80", _others),
        1.6, None, SUMMED, doubtful=_wrong_peers(_others)),
    Aim("ragged logits 4096 × 65536, 64 heads, fp8",
        _named("scores", _SCORES, lambda row: row["TFLOP/s"].get("fp8")),
        700, 994, "TFLOP/s", at_least=True),
    Aim("the same, SM80 form", _named("scores", _SCORES, lambda row: row["TFLOP/s"].get("sm80")),
        350, None, "TFLOP/s", at_least=True),
    Aim("top-k of 4096 × 65536",
        _named("topk", {"rows": 4096, "keys": 65536}, lambda row: medians(row).get("ours")),
        652, 326, "µs"),
    Aim("captured for 1 M, one request of 4k",
        _named("captured", {"B": 1, "context": 4096}, _longer), 1.15, 1.0, "× captured for 4k"),
    Aim("the same, 64 requests", _named("captured", {"B": 64, "context": 4096}, _longer),
        1.15, 1.0, "× captured for 4k"),
)  # fmt: skip


def aims(results: Results) -> str:
    """A table of those that the results say something about, empty without any."""
    cells = [line for aim in AIMS if (line := aim.cells(results))]
    head = ("work", "in", "aim", "beyond", "reached", "shapes", "")
    return f"Against what was aimed at:\n\n{markdown_table(head, cells)}" if cells else ""
