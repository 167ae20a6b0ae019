"""The kernels that the packages' source has, read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("attention_worker", "indexer_service", "ipc_handoff")
SUFFIX = "_kernel"
"""Of the name of every function that is launched; device functions have other names."""


def kernels(tree: Path) -> dict[str, str]:
    """module:function of every kernel under `tree`, and "triton" or "gluon"."""
    found = {}
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            module = ".".join(path.relative_to(tree).with_suffix("").parts)
            for name, language in _jitted(ast.parse(path.read_text())):
                if name.endswith(SUFFIX):
                    found[f"{module}:{name}"] = language
    return found


def _jitted(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions under `@triton.jit` or `@gluon.jit`, called or not."""
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            match called:
                case ast.Attribute(value=ast.Name(id=("triton" | "gluon") as language), attr="jit"):
                    yield node.name, language


def without_a_gate(
    written: dict[str, str], built: set[str], interpreted: set[str], excused: dict[str, str]
) -> list[str]:
    """What is wrong with the lists of gates: one line a kernel."""
    wrong = []
    for kernel, language in written.items():
        if kernel not in built:
            wrong.append(f"{kernel} is never compiled: give it a Build")
        if kernel in excused and language != "gluon":
            wrong.append(f"{kernel} is in NOT_INTERPRETED, and could be interpreted")
        if kernel not in interpreted and kernel not in excused:
            wrong.append(f"{kernel} is never interpreted: give it a Run")
    listed = built | excused.keys()
    wrong += [f"{kernel} is not in the source" for kernel in sorted(listed - written.keys())]
    return wrong
