"""The file that remembers what was tuned: one for a kind of GPU, a Triton and a version of ours.

    {"format": 1, "chosen": {"mqa_logits.paged": {"heads=64, next_n=1": "Configuration(...)"}}}

Processes may write it at the same time: each merges what it adds under a lock, and replaces the
file whole. A file that cannot be read or written costs measurements, never a start.
"""

import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

CACHE_DIRECTORY = "DSA_INDEXER_CACHE_DIR"
"""Environment variable: where tuned choices are kept."""

logger = logging.getLogger(__name__)


class _Tuned(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    chosen: dict[str, dict[str, str]] = {}


def directory() -> Path:
    """CACHE_DIRECTORY, else `dsa-indexer` in the user's cache directory."""
    given = os.environ.get(CACHE_DIRECTORY)
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "dsa-indexer"


def path(device: torch.device) -> Path:
    """The file for the kind of GPU that `device` is and the installed versions."""
    parts = ("tuned", _gpu(device), f"triton-{_version('triton')}", _version("dsa-indexer"))
    return directory() / ("_".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts) + ".json")


def remembered(device: torch.device, operation: str, key: str) -> str | None:
    """What was chosen for the operation and key, if anything."""
    return _read(path(device)).chosen.get(operation, {}).get(key)


def remember(device: torch.device, operation: str, key: str, configuration: str) -> None:
    """Adds a choice to the file."""
    file = path(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            tuned = _read(file)
            tuned.chosen.setdefault(operation, {})[key] = configuration
            _replace(file, json.dumps(tuned.model_dump(), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        logger.warning("%s: tuned choices are not kept: %s", file, error)


def _read(file: Path) -> _Tuned:
    try:
        return _Tuned.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        logger.warning("%s: cannot be used and is measured anew: %s", file, reason)
    return _Tuned()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing unlocks


def _replace(file: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=file.name, dir=file.parent)
    try:
        with os.fdopen(descriptor, "w") as new:
            new.write(text)
        os.replace(name, file)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "no-gpu"


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
