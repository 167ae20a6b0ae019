"""Modules run in processes of their own, without the seconds in which each would import torch.

`python -m tests.gates.forks` imports torch, and nothing of Triton's or the project's. For each line
of its standard input, a JSON object, it forks a process that runs a module as `python -m` would,
and answers with that process's status. `Forks` keeps several, each with one module at a time.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOTS = (".", "client", "proto")


class Forks:
    """Args:
    repository: the tree from which the processes that fork are started.
    count: how many modules run at a time.
    folder: where their output is kept.
    """

    def __init__(self, repository: Path, count: int, folder: Path) -> None:
        self._repository, self._folder = repository, folder
        self._pool = ThreadPoolExecutor(count)
        self._started: list[subprocess.Popen[str]] = []
        self._free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for _ in range(count):
            self._started.append(self._start())
            self._free.put(self._started[-1])

    def _start(self) -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if name != _INTERPRET}
        # numpy's products are small here, and its threads would wait for each other's cores.
        variables["OPENBLAS_NUM_THREADS"] = "1"
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gates.forks"], cwd=self._repository, env=variables,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def submit(self, tree: Path, module: str, *arguments: str) -> "Future[list[dict[str, Any]]]":
        """Run a module of a source tree; the JSON lines that it prints.

        The future raises RuntimeError, with the last of what it said, where it did not end well.
        """
        return self._pool.submit(self._run, tree, module, arguments)

    def _run(self, tree: Path, module: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
        server = self._free.get()
        assert server.stdin is not None and server.stdout is not None
        out = self._folder / f"{server.pid}.out"
        errors = self._folder / f"{server.pid}.err"
        asked = {"tree": str(tree), "module": module, "arguments": list(arguments),
                 "out": str(out), "errors": str(errors)}  # fmt: skip
        try:
            print(json.dumps(asked), file=server.stdin, flush=True)
            status = server.stdout.readline().strip()
            if status != "0":
                said = errors.read_text() if errors.exists() else ""
                raise RuntimeError(f"{module} {arguments}: {status}: {said[-2000:]}")
            return [json.loads(line) for line in out.read_text().splitlines()]
        finally:
            self._free.put(server)

    def close(self) -> None:
        for server in self._started:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
        self._pool.shutdown(cancel_futures=True)


_INTERPRET = "TRITON_INTERPRET"


def _run(asked: dict[str, Any]) -> int:
    """In the forked process: the module's status."""
    for name, number in (("out", 1), ("errors", 2)):
        file = os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    tree = Path(asked["tree"])
    os.chdir(tree)
    own = {str(Path(path or ".").resolve()) for path in (*ROOTS, "")}
    others = [path for path in sys.path if str(Path(path).resolve()) not in own]
    sys.path[:] = [*(str(tree / root) for root in ROOTS), *others]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.argv = [asked["module"], *asked["arguments"]]
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def main() -> None:
    import torch

    torch.set_num_threads(1)
    if loaded := {"triton", "ipc_handoff"} & sys.modules.keys():
        raise RuntimeError(f"{loaded}: imported too early")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
