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
def written(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "indexer_service" / "kernels" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return kernels(tmp_path)


def named(*functions: str) -> set[str]:
    return {f"indexer_service.kernels.a:{function}" for function in functions}


def test_kernels_are_found_in_the_syntax_tree(written: dict[str, str]) -> None:
    assert written.keys() == named("plain_kernel", "called_kernel", "other_kernel")
    assert list(written.values()) == ["triton", "triton", "gluon"]


def test_a_kernel_without_a_gate_is_named(written: dict[str, str]) -> None:
    most = named("plain_kernel", "other_kernel")
    excused = dict.fromkeys(named("other_kernel"), "why")
    wrong = without_a_gate(written, most, most, excused)
    (kernel,) = named("called_kernel")
    assert [line for line in wrong if kernel in line] == wrong
    assert ["Build" in line or "Run" in line for line in wrong] == [True, True]


def test_only_gluon_is_excused_from_interpreting(written: dict[str, str]) -> None:
    everything = set(written)
    (line,) = without_a_gate(written, everything, set(), dict.fromkeys(everything, "why"))[:1]
    assert "could be interpreted" in line


def test_a_gate_of_a_kernel_that_is_gone_is_named(written: dict[str, str]) -> None:
    everything = set(written)
    (line,) = without_a_gate(written, everything | {"a:gone_kernel"}, everything, {})
    assert line == "a:gone_kernel is not in the source"


def test_every_module_of_builds_and_runs_is_read() -> None:
    here = Path(__file__).parent
    there = {
        f"tests.gates.{path.stem}"
        for kind in ("builds", "runs")
        for path in here.glob(f"{kind}_*.py")
    }
    assert there == modules()
