"""Engines as tests drive them, and prompts that tell selections apart."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from tests.vllm.tiny_model import TOP_K, VOCABULARY

PAGE = 64
_PROGRAM = Path(__file__).with_name("engine_program.py")

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Compiling what vLLM compiles for its sampler takes longer than all tests.
    "TORCHDYNAMO_DISABLE": "1",
    # Nor what it compiles to look for drafts in prompts.
    "NUMBA_DISABLE_JIT": "1",
    # The model is tiny: threads would wait for each other, and for those of the engine beside it.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of an engine without a spawned core and worker: it starts in half the time."""


class Engine:
    """vLLM in processes of its own; `generate` and `call` once it is `started`.

    Args:
        folder: of this engine's own, for its log.
        environment: of vLLM and the plugin.
        options: of `vllm.LLM`.
    """

    def __init__(
        self, folder: Path, model: Path, environment: dict[str, str], **options: Any
    ) -> None:
        folder.mkdir()
        self.log = folder / "log"
        self._gate = folder / "gate"
        root = _PROGRAM.parents[2]
        # All of it from one tree, whatever the environment has installed.
        path = os.pathsep.join(map(str, (root, root / "client", root / "proto")))
        if IN_PROCESS.items() <= environment.items():
            options["distributed_executor_backend"] = "uni"
        own = {name: value for name, value in os.environ.items() if "DSA_INDEXER" not in name}
        reading, writing = os.pipe()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(model), str(writing), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env={**own, **QUIET, "PYTHONPATH": path, **environment},
                cwd=folder,
                text=True,
                start_new_session=True,
            )
        os.close(writing)
        self._replies: IO[str] = os.fdopen(reading)

    def started(self) -> Self:
        assert self._reply() == "started"
        return self

    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Tokens, log-probabilities and cached tokens of each prompt."""
        answers: list[dict[str, Any]] = self._ask("generate", prompts, str(self._gate))
        return answers

    def call(self, method: str, *arguments: Any) -> Any:
        """Of the extension of the only worker."""
        (answer,) = self.call_all(method, *arguments)
        return answer

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Of the workers' extensions, by rank."""
        told: list[Any] = self._ask("call", method, *arguments)
        return told

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self._ask("reset")

    def close(self) -> None:
        """Kill it, with the processes that it has started. A second time does nothing."""
        if self._replies.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._replies.close()

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        line = self._replies.readline()
        assert line, f"the engine ended: {self.log.read_text()[-4000:]}"
        return json.loads(line)


def prompts() -> list[list[int]]:
    """Longer than k, but for one; some with a beginning in common."""
    numbers = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(2, VOCABULARY) for _ in range(count)]

    first, long = tokens(300), tokens(411)
    return [
        first,
        long,
        first[: 3 * PAGE] + tokens(40),
        tokens(150),
        tokens(TOP_K + 1),
        tokens(TOP_K - 20),
        long[: 5 * PAGE] + tokens(9),
    ]


def answers(outputs: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """What must be the same, bit for bit."""
    return [(output["tokens"], output["logprobs"]) for output in outputs]
