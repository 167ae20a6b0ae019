"""Run every `Run` in the interpreter: `python -m tests.gates.interpret [planted | a name's part]`.

Prints one JSON line a run: its name, and what went wrong or null.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import tests.gates.interpreter  # noqa: F401 - importing repairs
from tests.gates.kernels import runs


def main(part: str) -> None:
    chosen = runs()
    if part == "planted":
        from tests.gates.planted import RUNS

        chosen, part = iter(RUNS), ""
    for run in chosen:
        if part in run.name:
            wrong = None
            try:
                run.check()
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error)[-400:]}"
            print(json.dumps({"name": run.name, "error": wrong}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
