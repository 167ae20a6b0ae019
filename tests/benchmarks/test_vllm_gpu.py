"""What the comparison of vLLM's backends complains about; it runs on a GPU elsewhere."""

from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.conftest import Program


@pytest.fixture
def vllm_gpu(program: Program) -> ModuleType:
    return program("vllm_gpu")


def case(**changed: Any) -> dict[str, Any]:
    tokens = {"1 x 4096": [[[1, 2], [-0.1, -0.2]]]}
    counts = {"inline_layers": 0, "answered_layers": 9}
    found = {"prefill": [[-1.0, -2.0]], "decode": tokens, "again": tokens, "statistics": [counts]}
    return {**found, **changed}


def test_equal_cases_are_not_complained_about(vllm_gpu: ModuleType) -> None:
    found = {name: case() for name in vllm_gpu.CASES}
    assert vllm_gpu.compare(found) == []
    assert found["inline"]["difference"] == 0


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("inline", {"again": {}}, "does not repeat"),
        ("remote", {"decode": {}, "again": {}}, "decode differs in bits"),
        ("remote", {"prefill": [[-1.0, -2.0001]]}, "prefill differs in bits"),
        ("inline, eager", {"prefill": [[-1.5, -2.5]]}, "0.5 off"),
        ("remote", {"statistics": [{"inline_layers": 1, "answered_layers": 8}]}, "inline_layers"),
        ("remote", {"statistics": [{"inline_layers": 0, "answered_layers": 0}]}, "answered"),
        ("inline", {"log": "no such device"}, "no such device"),
    ],
)
def test_what_differs_is_named(
    vllm_gpu: ModuleType, name: str, changed: dict[str, Any], says: str
) -> None:
    found = {each: case() for each in vllm_gpu.CASES}
    found[name] = case(**changed)
    (complaint,) = vllm_gpu.compare(found)
    assert name.split(",")[0] in complaint
    assert says in complaint


def test_vllm_need_not_repeat_itself(vllm_gpu: ModuleType) -> None:
    found = {name: case() for name in vllm_gpu.CASES}
    found["FLASHMLA_SPARSE"] = case(again={})
    assert vllm_gpu.compare(found) == []
