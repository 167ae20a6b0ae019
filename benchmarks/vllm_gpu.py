"""vLLM on a GPU, through its own sparse backends and through this project's: answers and times.

    python benchmarks/vllm_gpu.py [--phase start|answers|times|kills|two-gpus ...] [--case NAME ...]
        [--results FOLDER] [--minutes N] [--rehearse]

Every engine is a process of its own; those of a phase start side by side, and are asked in turns.
An engine that fails is told of, and the others go on; when a phase's minutes are over, what is
there is kept, and the next one begins. vLLM does not repeat its own tokens: with it
log-probabilities, selections and attention are compared within tolerances; this project's engines
are compared bit for bit. Exit status: 0 if everything compared as it must. `--rehearse` does the
same on a CPU with a tiny model, where vLLM is one for CPUs.
"""

import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results_file import RESULTS, card, write
from vllm_gpu_aims import aims, as_records
from vllm_gpu_bench import Bench
from vllm_gpu_cases import ONE_GPU, REHEARSED, STARTED, TIMED, TWO_GPUS, Case
from vllm_gpu_compare import Found, after_kills, complaints, failures
from vllm_gpu_phases import answers, kills, starts, times
from vllm_gpu_tables import table

PACKAGES = ("dsa-indexer", "torch", "triton", "vllm", "cuda-bindings")


def main(
    phase: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only engines of these names.")] = None,
    results: Annotated[Path, typer.Option(help="Folder for the results file.")] = RESULTS,
    minutes: Annotated[float, typer.Option(help="Of a phase: then nothing more is begun.")] = 8.0,
    rehearse: Annotated[bool, typer.Option(help="On a CPU, with a tiny model.")] = False,
) -> None:
    cases = PHASES_ON_A_CPU if rehearse else PHASES
    _check("phase", phase, list(cases))
    gpus = 1 if rehearse else torch.cuda.device_count()
    chosen = phase or [each for each in cases if each != TWO or gpus > 1]
    _check("case", case, [each for name in chosen for each in cases[name][2]])
    found: dict[str, Found] = {}
    said: list[str] = []
    seconds = 60 * minutes
    folder = Path(tempfile.mkdtemp(prefix="v"))
    try:
        with Bench(
            "rehearsal" if rehearse else "gpu", "cpu" if rehearse else "cuda", folder, seconds
        ) as bench:
            for name in chosen:
                run, compare, of_phase = cases[name]
                wanted = {each: of_phase[each] for each in of_phase if not case or each in case}
                if not wanted:
                    continue
                found[name] = {}
                bench.give(seconds)
                try:
                    run(bench, wanted, found[name])
                    said += [f"{name}: {fault}" for fault in compare(found[name], wanted)]
                except Exception as error:  # of one phase: the next ones have their turns
                    said.append(f"{name}: {error!r}")
                    traceback.print_exc()
                print(table(name, found[name]), flush=True)
    finally:
        if found and not rehearse:  # else the day's file stays
            _write(found, said, phase, results)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(map(str, aims(found))))
    print("\n".join(each[:1500] for each in said) or "everything compares as it must")
    sys.exit(bool(said))


def _check(option: str, given: Sequence[str] | None, known: Sequence[str]) -> None:
    if unknown := set(given or ()) - set(known):
        names = "; ".join(dict.fromkeys(known))
        raise typer.BadParameter(f"{option}: {min(unknown)} (fix: one of {names})")


def _write(
    found: dict[str, Found], said: list[str], phase: Sequence[str] | None, results: Path
) -> None:
    name = torch.cuda.get_device_name(0)
    suffix = "-vllm" + "".join(f"-{each}" for each in phase or ())
    kept = {of: {each: _short(told) for each, told in all_.items()} for of, all_ in found.items()}
    told = {"phases": kept, "aims": as_records(aims(found)), "complaints": said}
    path = write(card(name), name, told, packages=PACKAGES, suffix=suffix, folder=results)
    print(f"written: {path}")


def _short(told: dict[str, Any]) -> dict[str, Any]:
    """Without what was only kept to be compared."""
    dropped = {"prefill", "decode", "again", "samples", "load", "load, again"}
    return {name: value for name, value in told.items() if name not in dropped}


Phase = tuple[
    Callable[[Bench, Mapping[str, Case], Found], None],
    Callable[[Found, Mapping[str, Case]], list[str]],
    Mapping[str, Case],
]
TWO = "two-gpus"
_KILLED = ("inline", "remote")
PHASES: dict[str, Phase] = {
    "start": (starts, failures, STARTED),
    "answers": (answers, complaints, ONE_GPU),
    "times": (times, failures, {name: ONE_GPU[name] for name in TIMED}),
    "kills": (
        kills,
        after_kills,
        {each: ONE_GPU[each] for each in _KILLED},
    ),
    TWO: (answers, complaints, TWO_GPUS),
}
PHASES_ON_A_CPU: dict[str, Phase] = {
    "answers": (answers, complaints, REHEARSED),
    "times": (times, failures, REHEARSED),
    "kills": (kills, after_kills, REHEARSED),
}


if __name__ == "__main__":
    typer.run(main)
