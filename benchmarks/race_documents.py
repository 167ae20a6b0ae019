"""From results files of race lab and detectors: tables in docs/diagnosing-races.md."""

from pathlib import Path
from typing import Any

from documents import ROOT, markdown_table, origin, put, read

DIAGNOSING = ROOT / "docs" / "diagnosing-races.md"


def race_lab(results: Path) -> None:
    """Put what the lab found between its marks, by transport."""
    record = read(results)
    found: dict[str, Any] = record["results"]
    clean = found["clean"]
    rows = [
        (
            race["name"],
            f"`{race['kind']}`",
            ", ".join(sorted(race["stages"])) or "nowhere",
            f"{race['caught']:,} of {race['provoked']:,}",
            f"{race['milliseconds']:.0f}",
        )
        for race in found["provoked"]
    ]
    table = markdown_table(("race", "found as", "seen in", "caught", "ms each"), rows)
    steps = sum(clean["steps"].values())
    said = (
        f"{clean['false_alarms']} false alarms in {steps:,} clean steps; {clean['wrong']} of "
        f"{clean['compared']:,} compared answers wrong."
    )
    name = f"race-lab {found['transport']}"
    put(DIAGNOSING, name, "\n\n".join([origin(record, results), table, said]))


def detectors_cpu(results: Path) -> None:
    """Put what the detectors cost on the CPU transport between its marks."""
    record = read(results)
    found: dict[str, Any] = record["results"]
    layers, steps = found["layers"], found["steps"]
    rows = [
        (
            f"`{name}`",
            f"{one['step_p50_us']:.0f}",
            f"{one['step_added_p50_us']:+.0f}",
            f"{one['processor_us']:.0f}",
            f"{one['processor_added_percent']:+.1f} %",
        )
        for name, one in found.items()
        if isinstance(one, dict)
    ]
    head = (
        "detectors", "step p50, µs", "more than `none` in the same turn, p50, µs",
        "processor time of both sides, µs a step", "more than `none`",
    )  # fmt: skip
    words = found["generations written, a layer, both sides (us)"]
    said = (
        f"Steps of {layers} layers with one decode row over a short context, {steps:,} of each "
        f"setting. Generations are written in any case: {words:.1f} µs a layer on both sides."
    )
    put(
        DIAGNOSING, "detectors cpu",
        "\n\n".join([origin(record, results), markdown_table(head, rows), said]),
    )  # fmt: skip


def detector_pieces(results: Path) -> None:
    """Put what each detector does, timed by itself, between its marks."""
    record = read(results)
    found = record["results"]
    rows = [(name, f"{taken:.1f}") for name, taken in found["microseconds"].items()]
    said = (
        f"Steps of {found['rows']} requests, one row each, over {found['keys']} keys; both sides."
    )
    table = markdown_table(("what", "µs"), rows)
    put(DIAGNOSING, "detector pieces", "\n\n".join([origin(record, results), table, said]))


def detectors_gpu(results: Path) -> None:
    """Put what detectors and traces cost on a GPU between its marks."""
    record = read(results)
    found: dict[str, Any] = record["results"]
    rows = [
        (
            shape,
            f"`{way}`",
            f"{of['step_us']:.0f}",
            f"{of['added_percent']:+.2f} %" if "added_percent" in of else "",
            f"{of['begin_step_us']:.0f}",
            "all" if one["answered"] else "not all",
        )
        for shape, one in found["shapes"].items()
        for way, of in one["ways"].items()
    ]
    head = (
        "requests x context", "way", "step p50, µs", "more than `off` in the same turn, p50",
        "`begin_step`, p50 µs", "layers answered",
    )  # fmt: skip
    missing = [f"Not measured: {name}: {why}" for name, why in found["failed"].items()]
    table = markdown_table(head, rows)
    put(DIAGNOSING, "detectors gpu", "\n\n".join([origin(record, results), table, *missing]))
