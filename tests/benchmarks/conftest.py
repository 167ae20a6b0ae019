"""The programs of benchmarks/, which import each other as scripts do."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Program = Callable[[str], ModuleType]


@pytest.fixture
def program(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Imports one by name, fresh."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load
