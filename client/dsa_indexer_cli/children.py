"""Processes that look at a GPU for `dsa-indexer doctor`: they may crash or hang, it may not."""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

PEER_GONE = "the other process has ended"
"""What a child prints as its error when not it, but the one that it talks to has failed."""

_KILLED_SECONDS = 2.0
_LOOK_SECONDS = 0.02


class ChildFailed(Exception):
    """What a child could not do, in one line."""


class Child:
    """`python -m MODULE ARGUMENTS`, with this process's environment. It prints a JSON object.

    Output goes to files: a child that nobody reads does not stand still.

    Args:
        descriptors: that the child shares.
    """

    def __init__(self, module: str, *arguments: object, descriptors: tuple[int, ...] = ()) -> None:
        # Until `close`, and not until a block's end.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within the time."""
        try:
            self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self) -> dict[str, Any]:
        """What an ended child printed.

        Raises:
            ChildFailed: it printed an `error`, or ended without printing an object.
        """
        text = _read(self._output)
        try:
            found = json.loads(text.splitlines()[-1])
        except (ValueError, IndexError):
            lines = _read(self._errors).strip().splitlines()
            last = lines[-1] if lines else "it said nothing"
            raise ChildFailed(f"ended with status {self._process.returncode}: {last}") from None
        if "error" in found:
            raise ChildFailed(found["error"])
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """Kill it if it runs. One that the driver holds is not waited for."""
        self._process.kill()
        self.wait(_KILLED_SECONDS)
        self._output.close()
        self._errors.close()


def any_ended(children: list[Child], seconds: float) -> bool:
    """Wait until one has ended; False: none did within the time."""
    deadline = time.monotonic() + seconds
    while all(child.is_running for child in children):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _read(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read()
    return text.decode(errors="replace")
