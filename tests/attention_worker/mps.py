"""An MPS daemon of a test's own, for processes that are started with its variables."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsa_indexer_cli import mps


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of its clients."""
    if shutil.which(mps.CONTROL) is None:
        pytest.skip(f"needs {mps.CONTROL}")
    with mps.mps_daemon(folder) as variables:
        yield {**os.environ, **variables}
