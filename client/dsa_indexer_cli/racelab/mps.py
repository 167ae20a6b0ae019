"""An MPS daemon of the lab's own, where none serves the GPU yet."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from dsa_indexer_cli.doctor_gpus import mps_pipe

_CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 30


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
            return subprocess.run(command, env=environment).returncode
        finally:
            subprocess.run(
                [_CONTROL], input=b"quit\n", env=environment, check=False, timeout=_SECONDS
            )
