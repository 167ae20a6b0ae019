"""An MPS daemon of the lab's own, where none serves the GPU yet."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dsa_indexer_cli.doctor_gpus import mps_pipe

_CONTROL = "nvidia-cuda-mps-control"
_SECONDS, _LISTENS_SECONDS = 30, 30.0


def is_served() -> bool:
    """Whether a daemon listens where this process and its children look for one."""
    return mps_pipe().exists()


def run_under_mps(command: Sequence[str]) -> int:
    """A command in a process under a daemon of its own; its exit status.

    In a process, since a daemon must not end before those that have a context under it.

    Raises:
        RuntimeError: no daemon can be started.
    """
    if shutil.which(_CONTROL) is None:
        raise RuntimeError(
            f"device: no MPS daemon serves the GPU, and there is no {_CONTROL} to start one (fix: "
            "a GPU host whose driver has it, or --device cpu)"
        )
    with tempfile.TemporaryDirectory(prefix="dsa-indexer-mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **own}
        started = subprocess.run(
            [_CONTROL, "-d"], env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        if started.returncode:
            raise RuntimeError(f"device: {_CONTROL} -d: {started.stderr.strip()} (fix: as it says)")
        try:
            _wait_until_it_listens(Path(folder))
            return subprocess.run(command, env=environment).returncode
        finally:
            subprocess.run(
                [_CONTROL], input=b"quit\n", env=environment, check=False, timeout=_SECONDS
            )


def _wait_until_it_listens(folder: Path) -> None:
    """What is run would look for a daemon, and find none, and start one."""
    deadline = time.monotonic() + _LISTENS_SECONDS
    while not (folder / mps_pipe().name).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"device: {_CONTROL} -d: does not listen (fix: see its log)")
        time.sleep(0.01)
