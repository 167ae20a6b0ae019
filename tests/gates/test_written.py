"""No kernel escapes the gates: what the source has against what is compiled."""

from pathlib import Path

import pytest

from tests.gates.kernels import modules
from tests.gates.written import kernels, without_a_gate

SOURCE = """
import triton
from triton.experimental import gluon

@triton.jit
def plain_kernel(x):
    pass

@triton.jit(do_not_specialize=("n",))
def called_kernel(x, n):
    pass

@triton.jit
def part_of_one(x):
    pass

if True:
    @gluon.jit
    def other_kernel(x):
        pass
"""


@pytest.fixture
def written(tmp_path: Path) -> set[str]:
    path = tmp_path / "indexer_service" / "kernels" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return kernels(tmp_path)


def named(*functions: str) -> set[str]:
    return {f"indexer_service.kernels.a:{function}" for function in functions}


def test_kernels_are_found_in_the_syntax_tree(written: set[str]) -> None:
    assert written == named("plain_kernel", "called_kernel", "other_kernel")


def test_a_kernel_without_a_gate_is_named(written: set[str]) -> None:
    wrong = without_a_gate(written, named("plain_kernel", "other_kernel"), named("plain_kernel"))
    (called,), (other,) = named("called_kernel"), named("other_kernel")
    assert wrong == [
        f"{called} is never compiled: give it a Build",
        f"{called} is never interpreted: give it a Run",
        f"{other} is never interpreted: give it a Run",
    ]


def test_a_gate_of_a_kernel_that_is_gone_is_named(written: set[str]) -> None:
    (line,) = without_a_gate(written, written | {"a:gone_kernel"}, written)
    assert line == "a:gone_kernel is not in the source"


def test_every_module_of_builds_and_runs_is_read() -> None:
    here = Path(__file__).parent
    there = {
        f"tests.gates.{path.stem}"
        for kind in ("builds", "runs")
        for path in here.glob(f"{kind}_*.py")
    }
    assert there == modules()
