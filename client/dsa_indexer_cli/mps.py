"""An MPS daemon of a program's own, for processes that it starts with the daemon's variables."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 30


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Start a daemon and end it; the variables that its clients need.

    Args:
        folder: for its pipes and logs; made here. A path of a few characters: it holds sockets.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """
    folder.mkdir()
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **variables}
    try:
        subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            check=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"mps: no daemon could be started: {error} (fix: {CONTROL} of the NVIDIA driver's "
            "package in PATH, or another placement)"
        ) from None
    try:
        yield variables
    finally:
        subprocess.run(
            [CONTROL],
            input=b"quit\n",
            env=environment,
            check=False,
            timeout=_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
