"""What results of load tests say in docs/load.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from documents import ROOT, markdown_table, origin, put, read

LOAD = ROOT / "docs" / "load.md"

Record = tuple[dict[str, Any], Path]


def document(files: Sequence[Path]) -> None:
    """Put soaks and runs on a GPU between their marks; what no file is of is left alone."""
    records = [(read(file), file) for file in files]
    soaks = [record for record in records if "soak" in record[0]["results"]["workload"]]
    runs = [
        record
        for record in records
        if record not in soaks and record[0]["results"]["service"]["gpu"]
    ]
    for name, chosen, section in (("soaks", soaks, _soak), ("gpu-runs", runs, _run)):
        if chosen:
            put(LOAD, name, "\n\n".join(section(*record) for record in chosen))


def _soak(record: dict[str, Any], file: Path) -> str:
    found = record["results"]
    load, reopened = found["workload"]["load"], found["reopened"]
    said = (
        f"{_head(found)}, {load['sessions']} sessions, {_loop(load)}, {found['seconds']:.0f} s: "
        f"{found['steps']:,} steps; each session opened anew every {load['reopen_seconds']:g} s, "
        f"{reopened} times in all. {_answers(found)} "
        f"{'Everything held.' if found['ok'] else '**Not everything held.**'}"
    )
    rows = [
        (
            growth["process"],
            growth["what"].replace("_mib", ", MiB").replace("_", " "),
            f"{growth['first']:.1f}",
            f"{growth['last']:.1f}",
            f"{growth['allowed']:g}",
        )
        for growth in found["growths"]
    ]
    head = ("", "", "first quarter", "last quarter", "growth allowed")
    return "\n\n".join([origin(record, file), said, markdown_table(head, rows)])


def _run(record: dict[str, Any], file: Path) -> str:
    found = record["results"]
    layers = found["layers_with_an_indexer"]
    said = (
        f"{_head(found)}, {layers} layers: {found['rows_a_second']:,.0f} rows/s over all shapes. "
        f"{_answers(found)}"
    )
    rows = [_shape(shape, layers) for shape in found["shapes"] if shape["steps"]]
    head = (
        "steps", "requests ≤", "context ≤", "count", "rows/s", "step p50, ms", "p99",
        "on the GPU p50, ms", "p99", "µs a layer", "of single layers p50", "p99",
    )  # fmt: skip
    return "\n\n".join([origin(record, file), said, markdown_table(head, rows)])


def _shape(shape: dict[str, Any], layers: int) -> tuple[object, ...]:
    step, forward, layer = shape["step"], shape["forward"], shape["layer"]
    rows_a_step = shape["rows"] / shape["steps"]
    single = [f"{layer[p] * 1e3:.1f}" if layer["count"] else "" for p in ("p50", "p99")]
    return (
        shape["kind"], shape["requests"], f"{shape['context']:,}", shape["steps"],
        f"{rows_a_step / step['mean'] * 1e3:,.0f}", f"{step['p50']:.2f}", f"{step['p99']:.2f}",
        f"{forward['p50']:.2f}", f"{forward['p99']:.2f}", f"{forward['p50'] / layers * 1e3:.1f}",
        *single,
    )  # fmt: skip


def _head(found: dict[str, Any]) -> str:
    return f"`{found['workload']['name']}`, placement `{found['service']['placement']}`"


def _answers(found: dict[str, Any]) -> str:
    return (
        f"{found['checked']:,} answers compared, {found['wrong_answers']} wrong; "
        f"{found['inline_layers']} of {found['layers']:,} layers inline."
    )


def _loop(load: dict[str, Any]) -> str:
    return f"{load['rate']:g} steps/s each" if load["mode"] == "open" else f"{load['mode']} loop"
