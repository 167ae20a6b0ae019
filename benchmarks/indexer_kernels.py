"""The indexer's kernels beside vLLM's and DeepGEMM's: checked first, then timed in one run.

    python benchmarks/indexer_kernels.py                   on a CUDA machine: measure, write results
    python benchmarks/indexer_kernels.py --quick --only decode,topk
    python benchmarks/indexer_kernels.py --document FILE ...   -> docs/performance.md, figures
    python benchmarks/indexer_kernels.py --dry             tiny, on any machine: does it still run?

Times are medians of CUDA-graph replays in µs a call. Implementations take turns. Decode calls read
other pages every time, out of a pool many times larger than the L2 cache. "Byte floor" is the time
in which a call's bytes (132 a key) could be read at the rate at which this card copies memory.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from documents import PERFORMANCE, put, read
from indexer_decode import captured_for, whole_and_parts
from indexer_figures import draw
from indexer_inputs import DEVICE, Pool, form
from indexer_prefill import gather_of, insert_of, scores_of, select_of, topk_of
from indexer_rows import FORMS, DeadGPU, free, in_short, medians, stop_if_dead
from indexer_tables import section, together
from results_file import RESULTS, card, processor, write
from timing import copy_rate

from indexer_service.kernels.geometry import Geometry
from indexer_service.kernels.warm_up import warm_up

MARK = "indexer_kernels"
SECTIONS = ("decode", "captured", "scores", "topk", "select", "insert", "gather", "drafts")
PACKAGES = ("dsa-indexer", "torch", "triton", "vllm")


@dataclass(frozen=True)
class Plan:
    """What is measured. Shapes begin with the heads where heads matter.

    Attributes:
        decode, drafts: heads, requests, next_n and context.
        captured: heads, requests, context, and the longest that was agreed.
    """

    k: int
    warm: list[Geometry]
    pool_pages: int
    copied: int
    decode: list[tuple[int, int, int, int]]
    drafts: list[tuple[int, int, int, int]]
    captured: list[tuple[int, int, int, int]]
    scores: list[tuple[int, int, int]]
    topk: list[tuple[int, int]]
    select: list[tuple[int, int, int]]
    insert: list[int]
    gather: list[tuple[int, int]]


K4, K16, K64, K128, K256, M1 = 1 << 12, 1 << 14, 1 << 16, 1 << 17, 1 << 18, 1 << 20

FULL = Plan(
    k=2048,
    warm=[
        Geometry(
            heads=heads, max_context=M1, max_decode_rows=64, max_prefill_rows=K4, next_n=(1, 2)
        )
        for heads in (64, 32)
    ],
    pool_pages=1 << 17,
    copied=1 << 29,
    decode=[
        (64, 1, 1, K4), (64, 1, 1, K64), (64, 8, 1, K64), (64, 32, 1, K64), (64, 64, 1, K64),
        (64, 1, 1, K128), (64, 1, 1, M1), (64, 64, 1, K4), (32, 64, 1, K64),
        # For the figures.
        (64, 1, 1, K16), (64, 1, 1, K256), (64, 64, 1, K16), (64, 64, 1, K128),
    ],
    drafts=[(64, 32, 2, K64)],
    captured=[(64, 1, K4, M1), (64, 64, K4, M1)],
    scores=[(64, K4, K4), (64, K4, K64), (64, 2048, K128), (32, K4, K64)],
    topk=[(K4, K64), (2048, K128)],
    select=[(64, K4, K64)],
    insert=[64, K4, K64],
    gather=[(1, K64), (16, K64)],
)  # fmt: skip
QUICK = Plan(
    k=2048,
    warm=FULL.warm[:1],
    pool_pages=1 << 16,
    copied=1 << 29,
    decode=[(64, 1, 1, K4), (64, 1, 1, K64), (64, 64, 1, K64)],
    drafts=[(64, 32, 2, K64)],
    captured=[(64, 1, K4, M1)],
    scores=[(64, K4, K64)],
    topk=[(K4, K64)],
    select=[],
    insert=[K4],
    gather=[(1, K64)],
)
DRY = Plan(
    k=16,
    warm=[Geometry(heads=4, max_context=128, max_decode_rows=2, max_prefill_rows=4, k=16)],
    pool_pages=32,
    copied=1 << 12,
    decode=[(4, 1, 1, 64), (4, 1, 1, 128), (4, 1, 1, 192)],
    drafts=[(4, 2, 2, 64)],
    captured=[(4, 1, 64, 256)],
    scores=[(4, 8, 64)],
    topk=[(8, 64)],
    select=[(4, 8, 64)],
    insert=[16],
    gather=[(1, 64)],
)


def sections(plan: Plan, impl: str, rate: float) -> dict[str, list[partial[dict[str, Any]]]]:
    """What makes each section's rows."""
    pool, k = Pool(plan.pool_pages), plan.k
    return {
        "decode": [partial(whole_and_parts, *s, k, pool, rate, impl) for s in plan.decode],
        "captured": [partial(captured_for, *s, k, pool, impl) for s in plan.captured],
        "scores": [partial(scores_of, *s, impl) for s in plan.scores],
        "topk": [partial(topk_of, *s, k, rate, impl) for s in plan.topk],
        "select": [partial(select_of, *s, k, impl) for s in plan.select],
        "insert": [partial(insert_of, s, pool, rate, impl) for s in plan.insert],
        "gather": [partial(gather_of, *s, pool, rate, impl) for s in plan.gather],
        "drafts": [partial(whole_and_parts, *s, k, pool, rate, impl) for s in plan.drafts],
    }


def measure(plan: Plan, impl: str, only: set[str]) -> dict[str, Any]:
    """All sections, printed as they come; "failed" names the rows that could not be made."""
    rate = copy_rate(plan.copied)
    results: dict[str, Any] = {"copy B/s": rate, "implementation": impl, "failed": []}
    print(f"copies run at {rate / 1e12:.2f} TB/s", flush=True)
    try:
        _warm_up(plan, results)
        for name, rows in sections(plan, impl, rate).items():
            if not only or name in only:
                _section(name, rows, results)
    except DeadGPU as error:
        results["failed"].append(f"the GPU's context died, the rest was not measured: {error}")
    except KeyboardInterrupt:
        results["failed"].append("interrupted: the rest was not measured")
    return results


def _section(name: str, rows: list[partial[dict[str, Any]]], results: dict[str, Any]) -> None:
    """The rows that can be made."""
    began = time.monotonic()
    results[name] = []
    for row in rows:
        try:
            results[name].append(row())
            _say(name, results[name][-1])
        except DeadGPU:
            raise
        except Exception as error:
            shape = [size for size in row.args if isinstance(size, int)]
            _failed(f"{name} {shape}", error, results)
        free()
    print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


def _failed(what: str, error: Exception, results: dict[str, Any]) -> None:
    """Noted: the other rows are still worth their time, if the GPU lives."""
    stop_if_dead(f"{what}: {in_short(error)}")
    results["failed"].append(f"{what}: {in_short(error)}")
    print(results["failed"][-1], flush=True)


def _warm_up(plan: Plan, results: dict[str, Any]) -> None:
    """Makes and tunes what sessions of the plan's geometries need, in both forms."""
    results["warm-up"] = []
    for geometry, (name, arch) in product(plan.warm, FORMS.items()):
        what = f"warm-up, {geometry.heads} heads, {name}"
        try:
            with form(arch):
                report = warm_up(geometry, DEVICE)
            results["warm-up"].append({"what": what, **asdict(report)})
            print(f"{what}: {report}", flush=True)
        except Exception as error:  # what is not warm is made when it is checked
            _failed(what, error, results)


def _say(name: str, row: dict[str, Any]) -> None:
    shape = " ".join(f"{key}={value}" for key, value in row.items() if isinstance(value, int))
    times = ", ".join(f"{what} {time:.1f}" for what, time in medians(row).items())
    print(f"{name} {shape}: {times}")
    for kind in ("wrong", "absent"):
        reasons: dict[str, list[str]] = {}
        for what, why in row[kind].items():
            reasons.setdefault(why, []).append(what)
        for why, names in reasons.items():
            print(f"    {kind}: {', '.join(names)}: {why}")
    sys.stdout.flush()


def failures(results: dict[str, Any]) -> list[str]:
    """What of ours was wrong."""
    rows = [row for name in SECTIONS for row in results.get(name, ())]
    wrong = [f"{name}: {why}" for row in rows for name, why in row["wrong"].items()]
    return [*results["failed"], *wrong]


def document(files: Sequence[Path], into: Path) -> None:
    """Tables and figures of results files into a document; see `indexer_tables.together`."""
    results, sources = together([(read(file), file) for file in files], SECTIONS)
    figures = draw(results, into.parent / "figures")
    put(into, MARK, section(results, sources, figures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--document", type=Path, nargs="+",
        help="results files to put into the docs; a section is that of the first that has it",
    )  # fmt: skip
    parser.add_argument("--into", type=Path, default=PERFORMANCE, help="the document")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--impl", help="which implementation of ours (dry: the reference)")
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any machine")
    chosen = parser.parse_args()
    if chosen.document:
        document([file.resolve() for file in chosen.document], chosen.into)
        return 0
    if not chosen.dry and DEVICE.type != "cuda":
        sys.exit("a CUDA device is needed (or --dry)")
    plan, impl = (DRY, "reference") if chosen.dry else (FULL, "triton")
    plan, impl = QUICK if chosen.quick else plan, chosen.impl or impl
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor()
    results = measure(plan, impl, set(filter(None, chosen.only.split(","))))
    name = "dry" if chosen.dry else card(device)
    # A file a part: `--document` takes several.
    suffix = "-".join(filter(None, ["", MARK, "quick" * chosen.quick, *chosen.only.split(",")]))
    path = write(name, device, results, packages=PACKAGES, suffix=suffix, folder=chosen.results)
    print("written:", path)
    wrong = failures(results)
    print("\n".join(["WRONG:", *wrong]) if wrong else "all of ours right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
