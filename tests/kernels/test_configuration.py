"""Configuration: equal hashes mean equal bits; dispatch: implementations by name."""

import subprocess
import sys

import pytest
import torch

from indexer_service.kernels.configuration import Configuration, configuration
from indexer_service.kernels.dispatch import Operation


def test_the_hash_does_not_depend_on_the_order_of_settings() -> None:
    one = Configuration("e", {"a": "1", "b": "2"})
    other = Configuration("e", {"b": "2", "a": "1"})
    assert one.hash == other.hash
    assert len(one.hash) == 64


@pytest.mark.parametrize(
    "other",
    [Configuration("f", {"a": "1"}), Configuration("e", {"a": "2"}), Configuration("e", {})],
    ids=["engine", "value", "missing"],
)
def test_any_difference_changes_the_hash(other: Configuration) -> None:
    assert Configuration("e", {"a": "1"}).hash != other.hash


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "from indexer_service.kernels.configuration import *; print(configuration().hash)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == configuration().hash


def test_the_cpu_engines_hash_is_that_of_the_last_release() -> None:
    """It says what bits come out: a change of the code around it must not change it."""
    assert configuration().hash.startswith("0aea34a954d1ebf7")


def test_forms_and_architectures_of_triton_are_configurations_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashes = set()
    for arch in ("80", "86", "89", "90"):
        monkeypatch.setenv("DSA_INDEXER_FORCE_ARCH", arch)
        ours = configuration("triton")
        assert ours.settings["dot"] == ("e4m3" if int(arch) >= 89 else "fp16")
        hashes.add(ours.hash)
    assert len(hashes | {configuration().hash}) == 5


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ValueError, match=r"^engine: 'gpu' is unknown \(fix: one of: cpu-ref"):
        configuration("gpu")


def test_an_implementation_is_imported_only_when_it_is_used() -> None:
    operation = Operation("op", reference="math:sqrt", missing="no_such_module:f")
    cpu = torch.device("cpu")
    assert operation.implementation("auto", cpu)(9.0) == 3.0
    with pytest.raises(ModuleNotFoundError):
        operation.implementation("missing", cpu)


def test_an_unknown_implementation_is_named_with_the_choices() -> None:
    operation = Operation("op", reference="math:sqrt", fast="math:cbrt")
    with pytest.raises(ValueError, match=r"^impl: 'slow' does not implement op \(fix: one of: "):
        operation.implementation("slow", torch.device("cpu"))
