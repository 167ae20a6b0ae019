"""From a results file of the hand-over on a GPU: tables in docs/handoff.md, and its picture."""

from pathlib import Path
from typing import Any

from documents import ROOT, markdown_table, origin, put, read

HANDOFF = ROOT / "docs" / "handoff.md"
FIGURE = ROOT / "docs" / "figures" / "handoff-timeline.svg"
SHOWN_LAYERS = slice(20, 23)


def document(results: Path) -> None:
    """Write what the file says between the marks, and draw one step's layers."""
    record = read(results)
    found: dict[str, Any] = record["results"]
    parts = [origin(record, results), "", _decode_table(found), "", _other_table(found)]
    for placement, told in found.items():
        if "not measured" in told:
            parts.append(
                f"\n`{placement}` was not measured: {told['not measured'].splitlines()[0]}."
            )
    put(HANDOFF, "handoff_gpu", "\n".join(parts))
    timeline = next(
        (
            shape["timeline"]
            for shape in found.get("mps", {}).get("decode", [])
            if shape.get("timeline")
        ),
        None,
    )
    if timeline is not None:
        draw(timeline, FIGURE)


def _decode_table(found: dict[str, Any]) -> str:
    rows = []
    for placement, told in found.items():
        for shape in told.get("decode", []):
            alone, whole = shape["selection"], shape["with attention"]
            rows.append(
                (
                    placement,
                    shape["requests"],
                    f"{shape['context']:,}",
                    f"{alone['inline_us'] / 61:.1f}",
                    f"**{alone['added_us_a_layer']:.1f}**",
                    _number(alone, "added_us_a_layer_p99"),
                    f"{whole['inline_us'] / 1000:.2f}",
                    f"{whole['remote_us'] / 1000:.2f}",
                    f"**{whole['ratio']:.3f}**",
                    f"{whole['added_us_a_layer']:.1f}",
                    f"{whole['not_hidden_us']:.0f}",
                    f"{whole['not_ahead_us']:.0f}",
                    _share(alone),
                    _right(alone) if _right(whole) == "all" else _right(whole),
                )
            )
    head = (
        "placement", "requests", "context", "inline, µs a layer", "added", "p99 of layers",
        "step with attention, ms: inline", "remote", "ratio",
        "added a layer, keys' insertion included, µs",
        "plan and wake-up not hidden, µs: step after step", "with the GPU idle before",
        "share of waiting", "answered, the same bits",
    )  # fmt: skip
    return markdown_table(head, rows)


def _other_table(found: dict[str, Any]) -> str:
    rows = []
    for placement, told in found.items():
        if chunk := told.get("chunk"):
            rows.append(
                (
                    placement,
                    f"prefill chunk, {chunk['rows']} rows at {chunk['context']:,}",
                    f"{chunk['inline_us_a_layer']:.0f} µs a layer inline",
                    f"{chunk['remote_us_a_layer']:.0f} remote, × {chunk['ratio']:.3f}",
                )
            )
        for name in ("one session", "two sessions"):
            for one in told.get(name, []):
                rows.append(
                    (
                        placement,
                        f"8 requests at 65,536, {name}",
                        f"{one['median_us'] / 1000:.2f} ms a step",
                        f"most {one['most_us'] / 1000:.2f}",
                    )
                )
    return markdown_table(("placement", "work", "time", ""), rows)


def _number(values: dict[str, Any], name: str) -> str:
    return f"{values[name]:.1f}" if name in values else ""


def _right(values: dict[str, Any]) -> str:
    """Whether the service answered every layer, and with the same bits."""
    if not values["equal"]:
        return "**other bits**"
    return "all" if values["answered"] else "not all answered"


def _share(values: dict[str, Any]) -> str:
    return f"{100 * values['waiting_share']:.0f} %" if "waiting_share" in values else ""


def draw(timeline: dict[str, Any], path: Path) -> None:
    """Some layers of a step on both sides, by the GPU's clock."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "handoff"
    from matplotlib import pyplot

    worker, service = timeline["worker"][SHOWN_LAYERS], timeline["service"][SHOWN_LAYERS]
    zero = worker[0][0]
    figure, axes = pyplot.subplots(figsize=(9, 2.2))
    bars = (
        (1, worker, 0, 1, "stage", "tab:blue"),
        (1, worker, 1, 2, "wait", "lightgrey"),
        (1, worker, 2, 3, "hand back", "tab:green"),
        (0, service, 0, 1, "gate", "lightgrey"),
        (0, service, 1, 4, "score and select", "tab:orange"),
    )
    for height, side, begin, end, label, colour in bars:
        spans = [((row[begin] - zero) / 1e3, (row[end] - row[begin]) / 1e3) for row in side]
        axes.broken_barh(spans, (height - 0.35, 0.7), facecolors=colour, label=label)
    axes.set_yticks([0, 1], ["service", "worker"])
    axes.set_xlabel("µs")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), ncol=5, frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
