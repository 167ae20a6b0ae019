"""The indexer's figures: time over context, one for each batch that has several contexts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from indexer_rows import in_one_graph, medians

Value = Callable[[dict[str, Any]], float | None]

LINES: dict[str, tuple[Value, str, str]] = {
    "ours, fp8": (lambda row: medians(row).get("select fp8"), "#1f5fa8", "o-"),
    "ours, SM80 form": (lambda row: medians(row).get("select sm80"), "#5fa8e0", "s-"),
    "DeepGEMM + best of vLLM's top-k": (in_one_graph, "#c0504d", "^--"),
    "byte floor": (lambda row: row["byte floor µs"], "#808080", ":"),
}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """One SVG a batch, the same bytes from the same results; returns their paths."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in results.get("decode", ()):
        groups.setdefault((row["H"], row["B"]), []).append(row)
    several = {key: rows for key, rows in groups.items() if len(rows) > 2}
    if not several:
        return []
    folder.mkdir(exist_ok=True)
    return [
        _figure(batch, sorted(rows, key=lambda row: row["context"]), folder)
        for (_, batch), rows in several.items()
    ]


def _figure(batch: int, rows: list[dict[str, Any]], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and nothing in the file depends on when or by whom it was made.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dsa-indexer"}):
        figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
        for label, (value, colour, style) in LINES.items():
            points = [(row["context"], time) for row in rows if (time := value(row)) is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=colour, label=label, markersize=4
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        contexts = [row["context"] for row in rows]
        axes.set_xticks(contexts, [_short(context) for context in contexts])
        axes.minorticks_off()
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("µs")
        axes.set_title(f"select_paged, {rows[0]['H']} heads, batch {batch}, k = {rows[0]['k']}")
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, fontsize=9)
        figure.tight_layout()
        path = folder / f"indexer_select_b{batch}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return path


def _short(context: int) -> str:
    if context >= 1 << 20:
        return f"{context >> 20}M"
    return f"{context >> 10}k" if context >= 1 << 10 else str(context)
