"""Which implementation a call gets: preference, devices, and what one says it does not support."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from indexer_service.kernels import dispatch, indexer
from indexer_service.kernels.dispatch import PREFERENCE, Operation
from tests.kernels import inputs

CPU, CUDA, XPU = torch.device("cpu"), torch.device("cuda"), torch.device("xpu")


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> Operation:
    """One that has every implementation; "deepgemm" and "xpu" take even numbers only."""
    module = ModuleType("implementations")
    for name in PREFERENCE:
        setattr(module, name, lambda name=name: name)
    for name in ("deepgemm", "xpu"):
        setattr(module, f"{name}_unsupported", lambda n: "it is odd" if n % 2 else None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    dispatch._load.cache_clear()
    dispatch._load_check.cache_clear()
    return Operation("op", **{name: f"implementations:{name}" for name in PREFERENCE})


@pytest.mark.parametrize(
    ("device", "number", "expected"),
    [
        (CPU, 2, "reference"),
        (CUDA, 2, "triton"),
        (XPU, 2, "xpu"),
        (XPU, 1, "reference"),
    ],
)
def test_auto_takes_the_first_that_supports_device_and_call(
    operation: Operation, device: torch.device, number: int, expected: str
) -> None:
    assert operation.implementation("auto", device, number)() == expected


@pytest.mark.parametrize(("number", "expected"), [(2, "deepgemm"), (1, "reference")])
def test_auto_without_triton(operation: Operation, number: int, expected: str) -> None:
    del operation._paths["triton"]
    assert operation.implementation("auto", CUDA, number)() == expected


def test_it_runs_with_its_tensors_gpu_as_the_current_one(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched from another, a kernel would go to another GPU's stream."""
    entered: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append(CPU)

    second = torch.device("cuda", 1)
    monkeypatch.setattr(dispatch, "on", on)
    run = operation.implementation("triton", second, 2)
    assert entered == []
    assert run() == "triton"
    assert entered == [second, CPU]

    monkeypatch.setattr(indexer, "on", on)
    indexer.select_paged(*inputs.paged([5]).tensors, 2)
    indexer.select_ragged(*inputs.ragged([(0, 5)], 5).tensors, 2)
    assert entered[2:] == [CPU] * 4


def test_a_named_implementation_runs_on_any_device(operation: Operation) -> None:
    assert operation.implementation("triton", CPU, 2)() == "triton"


def test_a_named_implementation_that_does_not_support_the_call_says_why(
    operation: Operation,
) -> None:
    with pytest.raises(ValueError, match=r"^impl: 'deepgemm' does not support .*: it is odd \(fix"):
        operation.implementation("deepgemm", CUDA, 3)


def test_auto_imports_nothing_for_another_device() -> None:
    operation = Operation("op", reference="math:sqrt", deepgemm="no_such_module:f", triton="no:f")
    assert operation.implementation("auto", CPU)(9.0) == 3.0


def test_auto_without_any_for_the_device_is_an_error() -> None:
    operation = Operation("op", triton="math:sqrt")
    with pytest.raises(ValueError, match=r"^impl: op has none for cpu \(fix: one of: triton\)"):
        operation.implementation("auto", CPU)
