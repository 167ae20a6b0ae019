"""The phases of the vLLM comparison: what engines are asked, and in which order."""

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from vllm_gpu_bench import ANSWER_SECONDS, ATTACH_SECONDS, Bench, noted
from vllm_gpu_cases import Case
from vllm_gpu_compare import Found
from vllm_gpu_processes import Engine, Service

_SUCCESSOR_AFTER = 1.0


def starts(bench: Bench, cases: Mapping[str, Case], found: Found) -> None:
    """Seconds from nothing to the first request: one engine after the other.

    Every phase fills `found`, so that what is there survives its end.
    """
    for name, case in cases.items():
        with bench.engines({name: case}, found):
            print(name, found[name], flush=True)


def answers(bench: Bench, cases: Mapping[str, Case], found: Found) -> None:
    """What each engine answers, twice."""
    with bench.engines(cases, found) as engines:
        for name, engine in engines.items():
            case, path = cases[name], ""
            if case.gpus == 1:
                path = str(bench.folder / f"{name}.pt")
            with noted(found, name):
                found[name]["prefill"] = bench.ask(engine, "prefill", path)
                found[name]["samples"] = path
                for what, request in (("decode", "decode"), ("again", "decode")):
                    found[name][what] = bench.ask(engine, request)
                found[name]["statistics"] = bench.ask(engine, "statistics")


def times(bench: Bench, cases: Mapping[str, Case], found: Found) -> None:
    """Milliseconds of a decode step, row by row, engines in turns: medians over the rounds."""
    with bench.engines(cases, found) as engines:
        for row in bench.size.rows:
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for _ in range(bench.size.rounds):
                for name, engine in engines.items():
                    if "failed" not in found[name]:
                        with noted(found, name):
                            taken[name].append(bench.ask(engine, "times", row))
            for name, each in taken.items():
                kinds = {kind for one in each for kind in one}
                found[name].setdefault("milliseconds", {})[f"{row[0]} x {row[1]}"] = {
                    kind: round(median(one[kind] for one in each), 4) for kind in sorted(kinds)
                }
            print(row, {name: found[name]["milliseconds"] for name in taken}, flush=True)
        for name, engine in engines.items():
            if "failed" in found[name]:
                continue
            with noted(found, name):
                found[name]["statistics"] = bench.ask(engine, "statistics")


def kills(bench: Bench, cases: Mapping[str, Case], found: Found) -> None:
    """A service that is killed among decode steps, and one that comes in its place.

    Args:
        cases: two: inline, and the one with the service.

    Raises:
        ValueError: they are not two.
    """
    if len(cases) != 2:
        raise ValueError(f"case: {', '.join(cases)} alone (fix: inline and remote, or none named)")
    (inline, _), (remote, case) = cases.items()
    with bench.engines(cases, found) as engines:
        if inline in engines:
            with noted(found, inline):
                found[inline]["load"] = bench.ask(engines[inline], "load")
        if remote in engines:
            (service,) = bench.services(case)
            with noted(found, remote):
                _kill_under_load(bench, engines[remote], service, found[remote])


def _kill_under_load(bench: Bench, engine: Engine, service: Service, found: dict[str, Any]) -> None:
    bench.ask(engine, "prefill", "")
    engine.tell("load")
    time.sleep(bench.at_most(bench.size.kill_after))
    service.kill()
    time.sleep(_SUCCESSOR_AFTER)
    service.start()
    found["load"] = engine.answer(bench.at_most(ANSWER_SECONDS))
    found["attached again"] = bench.ask(engine, "attached", ATTACH_SECONDS)
    found["after the kill"] = bench.ask(engine, "statistics")
    found["load, again"] = bench.ask(engine, "load")
    found["statistics"] = bench.ask(engine, "statistics")
