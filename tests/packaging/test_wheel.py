"""The wheel holds everything, and what it holds works away from the repository."""

import json
import zipfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = {
    "ipc_handoff": "ipc_handoff",
    "indexer_service": "indexer_service",
    "attention_worker": "attention_worker",
    "indexer_client": "client/indexer_client",
    "dsa_indexer_cli": "client/dsa_indexer_cli",
    "dsa_indexer": "proto/dsa_indexer",
    "dsa_indexer_recordings": "tests/data",
}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
sys.modules.update(dict.fromkeys(["triton", "cuda", "vllm"]))
found = {}
def visit(name):
    module = importlib.import_module(name)
    found[name] = module.__file__
    for entry in pkgutil.iter_modules(module.__path__, name + "."):
        if entry.ispkg:
            visit(entry.name)
for name in %r:
    visit(name)
print(json.dumps(found))
"""

LOAD_COMMAND = """
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="dsa-indexer")
assert callable(command.load())
import dsa_indexer_cli.main
print(dsa_indexer_cli.main.__file__)
"""


def test_every_package_imports_from_the_wheel(
    repository: Path, installed: Path, python: Callable[..., str]
) -> None:
    """Also where none of the optional dependencies is installed."""
    found = json.loads(python(IMPORT_ALL % list(PACKAGES), installed))
    strangers = {name: file for name, file in found.items() if not file.startswith(f"{installed}/")}
    assert not strangers
    in_source = {
        ".".join([name, *init.parent.relative_to(repository / folder).parts])
        for name, folder in PACKAGES.items()
        for init in (repository / folder).rglob("__init__.py")
    }
    assert found.keys() == in_source


def test_every_source_file_is_in_the_wheel(repository: Path, wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{name}/{path.relative_to(repository / folder)}"
        for name, folder in PACKAGES.items()
        for path in (repository / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert not expected - shipped


def test_every_package_with_types_says_so(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    typed = PACKAGES.keys() - {"dsa_indexer_recordings"}
    assert not {f"{name}/py.typed" for name in typed} - shipped


def test_only_the_packages_are_installed(installed: Path) -> None:
    (distribution,) = distributions(path=[str(installed)])
    tops = {str(file).split("/")[0] for file in distribution.files or []}
    ours = {top for top in tops if not top.endswith(".dist-info")} - {"..", "bin"}
    assert ours == PACKAGES.keys()


def test_command_is_found_and_loads(installed: Path, python: Callable[..., str]) -> None:
    assert python(LOAD_COMMAND, installed).strip() == f"{installed}/dsa_indexer_cli/main.py"


def test_entry_points_name_modules_of_the_wheel(installed: Path) -> None:
    (distribution,) = distributions(path=[str(installed)])
    assert distribution.metadata["Name"] == "dsa-indexer"
    assert distribution.entry_points
    for entry in distribution.entry_points:
        path = installed.joinpath(*entry.module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), entry
