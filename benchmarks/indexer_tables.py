"""The indexer's results as the tables of docs/performance.md."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from documents import markdown_table, origin
from indexer_aims import aims
from indexer_rows import (
    CHAINS,
    RIGHT,
    TOPK,
    best,
    decode_rows,
    in_one_graph,
    medians,
    share_of_right_keys,
    summed,
)

Rows = Sequence[dict[str, Any]]


def together(
    records: Sequence[tuple[dict[str, Any], Path]], sections: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """Results of several files: a section is that of the first file that has it.

    Returns:
        the results, "failed" being what the last file lacks; and where each section is from.
    """
    results: dict[str, Any] = {}
    sources = []
    for record, path in records:
        here = record["results"].items()
        new = {name: part for name, part in here if part and name not in results}
        results |= new
        source = origin(record, path)
        if len(records) > 1:
            source += f" From there: {', '.join(name for name in sections if name in new)}."
        sources.append(source)
    results["failed"] = records[-1][0]["results"]["failed"]
    return results, "\n\n".join(sources)


def section(results: dict[str, Any], sources: str, figures: Sequence[Path]) -> str:
    """Everything between the marks."""
    parts = [
        f"{sources} Copies run at {results['copy B/s'] / 1e12:.2f} TB/s. Times in µs, "
        f"medians; {_spread(results)}",
        aims(results),
    ]
    tables = {
        "decode": (_decode, _decode_parts),
        "captured": (_captured,),
        "scores": (_scores,),
        "topk": (_topk,),
        "select": (_select,),
        "insert": (_insert,),
        "gather": (_gather,),
    }
    for name, make in tables.items():
        rows = decode_rows(results) if name == "decode" else results.get(name)
        if rows:
            parts += [table(rows) for table in make]
            if name == "decode":
                parts += [
                    f"![{each.stem.replace('_', ' ')}](figures/{each.name})" for each in figures
                ]
    if results["failed"]:
        parts.append(f"Not measured: {'; '.join(results['failed'])}.")
    if results.get("warm-up"):
        warmed = [
            f"{each['what'].removeprefix('warm-up, ')}: {each['kernels']} kernels, "
            f"{each['seconds']:.0f} s"
            for each in results["warm-up"]
        ]
        parts.append(f"Warm-up, tuning included: {'; '.join(warmed)}.")
    return "\n\n".join(filter(None, parts))


def _spread(results: dict[str, Any]) -> str:
    """How far the rounds of ours lay apart."""
    ours = [
        (most - least) / middle * 100
        for row in decode_rows(results)
        for name, (middle, least, most) in row["µs"].items()
        if name.startswith("select")
    ]
    if not ours:
        return "least and most of the rounds are in the file."
    return (
        f"the rounds of `select_paged` lay {median(ours):.0f} % apart, at most {max(ours):.0f} % "
        "(least and most are in the file)."
    )


def _decode(rows: Rows) -> str:
    head = (
        "H", "B", "next_n", "context", "ours, fp8", "ours, SM80 form",
        "DeepGEMM + best top-k, one graph", "the two alone, summed", "fp8 / graph", "fp8 / sum",
        "SM80 / graph", "SM80 / sum", "byte floor", "fp8 / floor",
    )  # fmt: skip
    cells = []
    for row in rows:
        times, floor = medians(row), row["byte floor µs"]
        name, both, apart = best(row, CHAINS), in_one_graph(row), summed(row)
        fp8, sm80 = times.get("select fp8"), times.get("select sm80")
        cells.append([
            row["H"], row["B"], row["next_n"], _thousands(row["context"]), _bold(fp8), _time(sm80),
            f"{both:.1f} ({_named(row, name)})" if name and both else "",
            _time(apart), _ratio(fp8, both), _ratio(fp8, apart), _ratio(sm80, both),
            _ratio(sm80, apart), _time(floor), _ratio(fp8, floor),
        ])  # fmt: skip
    return (
        f"**`indexer.select_paged`**, the whole selection of decode rows, k = {rows[0]['k']}. The "
        "peers' times leave out DeepGEMM's schedule, which vLLM makes once a step:\n\n"
        f"{markdown_table(head, cells)}"
    )


def _named(row: dict[str, Any], chain: str) -> str:
    share, name = share_of_right_keys(row, chain), chain.removeprefix("DeepGEMM + ")
    return name if share >= RIGHT else f"{name}, {share:.0%} of the right keys"


PARTS = {
    "fp8 logits in it": "logits fp8, packed", "SM80 logits in it": "logits sm80, packed",
    "`mqa_logits.paged`, fp8": "logits fp8", "SM80 form": "logits sm80",
    "DeepGEMM logits": "DeepGEMM logits", "its schedule, once a step": "DeepGEMM schedule",
    "`topk.select`": "top-k", **{f"vLLM {name}": name for name in TOPK},
    "torch.topk": "torch.topk", "DeepGEMM + `topk.select`": "DeepGEMM + our top-k",
}  # fmt: skip
"""Columns of the parts, and what the results call them."""


def _decode_parts(rows: Rows) -> str:
    head = ("H", "B", "next_n", "context", *PARTS)
    cells = [
        [
            row["H"],
            row["B"],
            row["next_n"],
            _thousands(row["context"]),
            *_times(row, tuple(PARTS.values())),
        ]
        for row in rows
    ]
    return (
        "Its parts, each alone (the last column: two in one graph). `mqa_logits.paged` writes rows "
        f"apart, with -inf past their ends, which the whole does not need:\n\n"
        f"{markdown_table(head, cells)}"
    )


def _captured(rows: Rows) -> str:
    head = ("H", "B", "context", "captured for", "form", "own", "long", "long / own")
    cells = []
    for row in rows:
        times = medians(row)
        shape = [row["H"], row["B"], _thousands(row["context"]), _thousands(row["captured for"])]
        for name in ("select fp8", "select sm80", *CHAINS):
            own, long = times.get(f"{name}, own"), times.get(f"{name}, long")
            if own and long:
                label = name.replace("select", "ours,")
                cells.append([*shape, label, _time(own), _time(long), _ratio(long, own)])
    return (
        "**A graph captured for a longer context** than its rows have, beside one captured for "
        f"their own:\n\n{markdown_table(head, cells)}"
    )


def _scores(rows: Rows) -> str:
    head = ("H", "rows", "keys", "fp8", "TFLOP/s", "SM80 form", "TFLOP/s", "DeepGEMM", "TFLOP/s")
    cells = []
    for row in rows:
        times, rate = medians(row), row["TFLOP/s"]
        cells.append([row["H"], row["rows"], _thousands(row["keys"])])
        for name in ("fp8", "sm80", "DeepGEMM"):
            cells[-1] += [_time(times.get(name)), f"{rate[name]:.0f}" if name in rate else ""]
    return f"**Ragged logits** (`mqa_logits.ragged`):\n\n{markdown_table(head, cells)}"


def _topk(rows: Rows) -> str:
    head = (
        "rows",
        "keys",
        "k",
        "ours",
        "vLLM per row",
        "torch.topk",
        "ours / per row",
        "byte floor",
    )
    cells = []
    for row in rows:
        times = medians(row)
        cells.append([
            row["rows"], _thousands(row["keys"]), row["k"],
            *_times(row, ("ours", "per row", "torch.topk")),
            _ratio(times.get("ours"), times.get("per row")), _time(row["byte floor µs"]),
        ])  # fmt: skip
    return f"**Top-k of prefill rows** (`topk.select`):\n\n{markdown_table(head, cells)}"


def _select(rows: Rows) -> str:
    names = ("fp8", "sm80", "DeepGEMM + per row")
    cells = [
        [row["H"], row["rows"], _thousands(row["keys"]), *_times(row, names),
         _ratio(medians(row).get("fp8"), medians(row).get(names[2]))]
        for row in rows
    ]  # fmt: skip
    head = ("H", "rows", "keys", "fp8", "SM80 form", "DeepGEMM + vLLM per row", "fp8 / peer")
    return f"**`indexer.select_ragged`**:\n\n{markdown_table(head, cells)}"


def _insert(rows: Rows) -> str:
    head = ("tokens", "ours", "vLLM", "byte floor")
    cells = [
        [_thousands(row["tokens"]), *_times(row, ("ours", "vLLM")), _time(row["byte floor µs"])]
        for row in rows
    ]
    return f"**K cache, insert**:\n\n{markdown_table(head, cells)}"


def _gather(rows: Rows) -> str:
    head = ("requests", "tokens each", "ours", "vLLM", "byte floor", "ours, whole call")
    cells = [
        [row["requests"], _thousands(row["length"]), *_times(row, ("ours", "vLLM")),
         _time(row["byte floor µs"]), *_times(row, ("ours, whole call",))]
        for row in rows
    ]  # fmt: skip
    return (
        "**K cache, gather**: the copy, its sizes known; and by the host's clock the whole call, "
        f"which reads the lengths first:\n\n{markdown_table(head, cells)}"
    )


def _times(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    times = medians(row)
    return [_time(times.get(name)) for name in names]


def _time(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _bold(value: float | None) -> str:
    return "" if value is None else f"**{value:.1f}**"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else ""


def _thousands(number: int) -> str:
    return f"{number:,}"
