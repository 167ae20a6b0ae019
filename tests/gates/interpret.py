"""Run every `Run` in the interpreter: `python -m tests.gates.interpret [a part of a name]`, or the
n-th of so many equal shares of them: `... "" n many`.

With `planted`: the sound and faulty runs of `planted_runs`; with `planted_gluon`: the Gluon kernels
with those faults; with `unrepaired`: those whose numbers Triton's own interpreter gets wrong, in
that interpreter. Prints one JSON line a run: its name, what went wrong or null, and the kernels
that were launched so far.
"""

import json
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from itertools import islice

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

from tests.gates.kernels import Run, runs


def chosen(part: str) -> Iterable[Run]:
    if part == "unrepaired":
        return import_module("tests.gates.planted_runs").UNREPAIRED
    for module in ("interpreter", "watch", "gluon.launch"):  # importing one puts it in place
        import_module(f"tests.gates.{module}")
    if part == "planted":
        return import_module("tests.gates.planted_runs").RUNS
    if part == "planted_gluon":
        return import_module("tests.gates.planting").faulty_runs()
    return (run for run in runs() if part in run.name)


def main(part: str = "", share: str = "0", shares: str = "1") -> None:
    for run in islice(chosen(part), int(share), None, int(shares)):
        wrong = None
        try:
            run.check()
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[-400:]}"
        watch = sys.modules.get("tests.gates.watch")
        kernels = sorted(watch.launched) if watch else []
        print(json.dumps({"name": run.name, "error": wrong, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
