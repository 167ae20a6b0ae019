"""Engines and services of the vLLM comparison, each in a process of its own.

Whatever becomes of one of them is told by an `EngineFailed`, and is no trouble of the others.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from handoff_gpu import wait_until_it_serves
from vllm_gpu_cases import Case

ENGINE = Path(__file__).with_name("vllm_gpu_engine.py")
_LOG_TAIL = 3000


class EngineFailed(Exception):
    """An engine that ended or did not answer in time, with the end of its log."""


class Engine:
    """An engine; it starts while others do, and `ask` waits for it.

    Args:
        log: a file for what it says.
    """

    def __init__(self, case: Case, size: str, log: Path, environment: dict[str, str]) -> None:
        options = dict(case.options)
        if case.backend is not None:
            options["attention_backend"] = case.backend
        if case.gpus == 1:
            environment = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._log = log
        reading, writing = os.pipe()
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE), size, str(writing), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env={**environment, **case.variables},
                text=True,
                start_new_session=True,
            )
        os.close(writing)
        self._reading, self._rest = reading, b""
        self.started: dict[str, Any] | None = None

    def wait_started(self, seconds: float) -> dict[str, Any]:
        """How long it took, and pages of its KV cache."""
        if self.started is None:
            self.started = self.answer(seconds)
        return self.started

    def tell(self, *request: Any) -> None:
        """Ask, without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("ended") from None

    def ask(self, *request: Any, seconds: float) -> Any:
        self.tell(*request)
        return self.answer(seconds)

    def close(self) -> None:
        """Kill it with the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reading)

    def answer(self, seconds: float) -> Any:
        """To what was told."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                raise self._failed(f"said nothing for {seconds:.0f} s")
            read = os.read(self._reading, 1 << 16)
            if not read:
                raise self._failed("ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _failed(self, how: str) -> EngineFailed:
        return EngineFailed(f"{how}; its log: {self._log.read_text()[-_LOG_TAIL:]}")


class Service:
    """A service on one device, at one address for all its processes."""

    def __init__(self, folder: Path, device: str, environment: dict[str, str]) -> None:
        """
        Args:
            folder: of its own: the socket and the log.
            device: cpu, or cuda:0 and so on.
        """
        folder.mkdir(parents=True)
        self.address = f"unix:{folder / 'd' / 'i.sock'}"
        self._command = [sys.executable, "-m", "dsa_indexer_cli", "serve"]
        self._command += ["--address", self.address, "--device", device]
        self._environment, self._log = environment, folder / "log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )

    def wait_serving(self) -> None:
        """Raises RuntimeError, with the end of its log, if it does not come."""
        wait_until_it_serves(self.address, self._process, self._log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
