"""An MPS daemon of a test's own, for processes that are started with its variables."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of its clients."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"needs {CONTROL}")
    folder.mkdir()
    variables = {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
        "CUDA_MPS_LOG_DIRECTORY": str(folder),
    }
    subprocess.run([CONTROL, "-d"], env=variables, check=True, timeout=30)
    try:
        yield variables
    finally:
        subprocess.run([CONTROL], input=b"quit\n", env=variables, check=False, timeout=30)
