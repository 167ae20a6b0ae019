"""The kernels that the packages' source has, read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("attention_worker", "indexer_service", "ipc_handoff")
SUFFIX = "_kernel"
"""Of the name of every function that is launched; device functions have other names."""


def kernels(tree: Path) -> set[str]:
    """module:function of every kernel under `tree`, in Triton or Gluon."""
    found = set()
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            module = ".".join(path.relative_to(tree).with_suffix("").parts)
            for name in _jitted(ast.parse(path.read_text())):
                if name.endswith(SUFFIX):
                    found.add(f"{module}:{name}")
    return found


def _jitted(tree: ast.Module) -> Iterator[str]:
    """Functions under `@triton.jit` or `@gluon.jit`, called or not."""
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            match called:
                case ast.Attribute(value=ast.Name(id="triton" | "gluon"), attr="jit"):
                    yield node.name


def without_a_gate(written: set[str], built: set[str], interpreted: set[str]) -> list[str]:
    """What is wrong with the lists of gates: one line a kernel."""
    wrong = [f"{kernel} is never compiled: give it a Build" for kernel in written - built]
    wrong += [f"{kernel} is never interpreted: give it a Run" for kernel in written - interpreted]
    wrong += [f"{kernel} is not in the source" for kernel in built - written]
    return sorted(wrong)
