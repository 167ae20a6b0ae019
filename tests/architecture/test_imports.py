"""Who may import whom, read from the syntax trees: nothing is imported to find out."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SOURCE_ROOTS = [".", "client", "proto"]

# Each unit of ours and the units it may import besides itself. A module belongs to the
# unit with the longest matching name.
ARROWS: dict[str, set[str]] = {
    "dsa_indexer": set(),
    "ipc_handoff": {"dsa_indexer"},
    "indexer_client": {"ipc_handoff", "dsa_indexer"},
    "indexer_service.kernels": set(),
    "indexer_service": {"indexer_service.kernels", "ipc_handoff", "dsa_indexer"},
    "attention_worker.kernels": {"indexer_service.kernels"},
    "attention_worker": {
        "attention_worker.kernels",
        "indexer_client",
        "indexer_service.kernels",
        "ipc_handoff",
        "dsa_indexer",
    },
    "dsa_indexer_cli": {
        "attention_worker",
        "attention_worker.kernels",
        "indexer_client",
        "indexer_service",
        "indexer_service.kernels",
        "ipc_handoff",
        "dsa_indexer",
        "dsa_indexer_recordings",
    },
    "dsa_indexer_recordings": set(),
}

# Foreign packages and the only modules that may import them (patterns of module names).
ONLY: dict[str, list[str]] = {
    "vllm": ["attention_worker", "attention_worker.*"],
    "opentelemetry": ["ipc_handoff.telemetry.*"],
}

# Modules and the foreign packages they must not import.
NEVER: dict[str, list[str]] = {
    "*.kernels": ["grpc", "vllm"],
    "*.kernels.*": ["grpc", "vllm"],
    "ipc_handoff*": ["grpc"],
    "indexer_service.handlers*": ["triton"],
    "indexer_service.rpc*": ["triton"],
}

LONGEST_FILE = 350


def modules(tree: Path) -> dict[str, Path]:
    """Every module of ours by name, generated ones left out."""
    found = {}
    for root in SOURCE_ROOTS:
        for top in {unit.split(".")[0] for unit in ARROWS}:
            for path in (tree / root / top).rglob("*.py"):
                if "_pb2" not in path.name:
                    parts = path.relative_to(tree / root).with_suffix("").parts
                    found[".".join(parts).removesuffix(".__init__")] = path
    return found


def unit_of(name: str) -> str | None:
    units = [unit for unit in ARROWS if f"{name}.".startswith(f"{unit}.")]
    return max(units, key=len, default=None)


def imported(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, at whatever depth of the file."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*above, source] if source else above)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violations(tree: Path) -> list[str]:
    found = []
    for module, path in sorted(modules(tree).items()):
        unit = unit_of(module)
        for line, name in imported(module, path):
            where = f"{path.relative_to(tree)}:{line}: {module} imports {name}"
            target, foreign = unit_of(name), name.split(".")[0]
            if unit and target and target != unit and target not in ARROWS[unit]:
                found.append(f"{where}: {unit} may not import {target}")
            if foreign in ONLY and not any(fnmatchcase(module, p) for p in ONLY[foreign]):
                found.append(f"{where}: only {' and '.join(ONLY[foreign])} may")
            for pattern, packages in NEVER.items():
                if fnmatchcase(module, pattern) and foreign in packages:
                    found.append(f"{where}: {pattern} must not")
    return found


def long_files(tree: Path) -> list[str]:
    """Files of ours, tests and benchmarks included, that are too long to hold one idea."""
    found = []
    paths = [*modules(tree).values()]
    for folder in ("tests", "benchmarks", "tools"):
        paths += (tree / folder).rglob("*.py")
    for path in sorted(paths):
        lines = len(path.read_text().splitlines())
        if lines > LONGEST_FILE:
            found.append(f"{path.relative_to(tree)}: {lines} lines")
    return found


def test_arrows_point_one_way(repository: Path) -> None:
    assert not violations(repository)


def test_no_file_is_too_long(repository: Path) -> None:
    assert not long_files(repository)


def test_every_unit_exists(repository: Path) -> None:
    """A rule for a package that was renamed would hold for ever."""
    units = {unit_of(name) for name in modules(repository)} | {"dsa_indexer_recordings"}
    assert units == ARROWS.keys()


@pytest.mark.parametrize("package", ["indexer_service.kernels", "attention_worker.kernels"])
def test_kernels_load_nothing_of_the_service(package: str) -> None:
    """The packages around the kernels are imported with them, and must stay as light."""
    program = (
        f"import sys, {package}\n"
        "heavy = {'grpc', 'opentelemetry', 'pydantic', 'vllm', 'ipc_handoff', 'indexer_client'}\n"
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    ("file", "line", "says"),
    [
        ("ipc_handoff/a.py", "import indexer_client.session", "may not import indexer_client"),
        ("ipc_handoff/a.py", "from indexer_service import rpc", "may not import indexer_service"),
        ("indexer_service/a.py", "import indexer_client", "may not import indexer_client"),
        ("indexer_service/a.py", "from attention_worker.kernels import x", "may not import"),
        ("indexer_service/a.py", "import vllm.config", "only attention_worker"),
        (
            "indexer_service/kernels/a.py",
            "from .. import sessions",
            "may not import indexer_service",
        ),
        ("indexer_service/kernels/a.py", "from ipc_handoff import device", "may not import ipc_"),
        ("indexer_service/kernels/a/b.py", "import grpc.aio", "must not"),
        ("indexer_service/handlers.py", "import triton.language as tl", "must not"),
        ("indexer_service/rpc/steps.py", "from triton import jit", "must not"),
        (
            "indexer_service/server.py",
            "from opentelemetry import trace",
            "only ipc_handoff",
        ),
        (
            "indexer_service/a.py",
            "def f():\n    import dsa_indexer_cli",
            "may not import dsa_",
        ),
        ("indexer_service/a.py", 'importlib.import_module("indexer_client")', "may not import"),
        ("attention_worker/a.py", "from indexer_service import server", "may not import indexer_s"),
        ("attention_worker/kernels/a.py", "import vllm", "must not"),
        ("attention_worker/kernels/a.py", "import ipc_handoff", "may not import ipc_handoff"),
        ("client/indexer_client/a.py", "import torch, indexer_service.kernels", "may not import"),
        (
            "client/indexer_client/a.py",
            "import dsa_indexer_cli.main",
            "may not import dsa_",
        ),
        ("client/dsa_indexer_cli/a.py", "import vllm", "only attention_worker"),
    ],
)
def test_forbidden_import_is_seen(tmp_path: Path, file: str, line: str, says: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    (report,) = violations(tmp_path)
    assert says in report
    assert report.startswith(file)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attention_worker/a.py", "from indexer_service.kernels import indexer"),
        ("attention_worker/a.py", "from indexer_service import kernels"),
        ("attention_worker/vllm_compat.py", "import vllm"),
        ("ipc_handoff/telemetry/tracing.py", "from opentelemetry import trace"),
        ("indexer_service/kernels/topk/a.py", "from ..mqa_logits import reference"),
        ("client/dsa_indexer_cli/a.py", "import attention_worker, indexer_service.server"),
        ("client/indexer_client/a.py", "import grpc\nfrom dsa_indexer.v1 import indexer_pb2"),
    ],
)
def test_allowed_import_passes(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    assert not violations(tmp_path)


def test_long_file_is_seen(tmp_path: Path) -> None:
    for name, lines in (("short", LONGEST_FILE), ("long", LONGEST_FILE + 1)):
        path = tmp_path / "ipc_handoff" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * lines)
    assert long_files(tmp_path) == [f"ipc_handoff/long.py: {LONGEST_FILE + 1} lines"]
