"""The project as a user gets it: built into a wheel, installed away from its source."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE_ROOTS = [
    "ipc_handoff",
    "indexer_service",
    "attention_worker",
    "client/indexer_client",
    "client/dsa_indexer_cli",
    "proto/dsa_indexer",
    "tests/data",
]

Python = Callable[..., str]

# Releases whose own stubs import on the oldest protobuf; the environment has newer ones.
COMPANIONS = {
    "5.29.6": [
        "grpcio-health-checking==1.71.2",
        "grpcio-reflection==1.71.2",
        "googleapis-common-protos==1.66.0",
        "opentelemetry-proto==1.30.0",
    ]
}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: an older build's leftovers in the source tree would go into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    for root in PACKAGE_ROOTS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repository / root, source / root, ignore=ignore)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was installed."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


@pytest.fixture(scope="session")
def protobuf(repository: Path) -> Callable[[str], Path]:
    """Gives the folder of a protobuf release with packages whose stubs it can read.

    Fetched once; `make clean` removes it.
    """

    def folder(version: str) -> Path:
        target = repository / ".venv-protobuf" / version
        if not target.exists():
            # Renamed when complete, so that an interrupted install is not taken for one.
            unfinished = target.with_name(f"{version}.{os.getpid()}")
            packages = [f"protobuf=={version}", *COMPANIONS.get(version, ())]
            pip("install", "-qq", "--no-deps", "--target", str(unfinished), *packages)
            unfinished.rename(target)
        return target

    return folder


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Runs a program in a folder of its own with the given folders first on its path."""

    def run(program: str, *path: Path) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
