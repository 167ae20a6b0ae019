"""Which GPU's kernels run."""

import pytest
import torch

from indexer_service.kernels import architecture as ours

CPU = torch.device("cpu")


def test_without_a_gpu_the_first_architecture_with_native_fp8_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ours.FORCE_ARCH, raising=False)
    assert ours.architecture(CPU) == 89
    assert ours.native_fp8(89)
    assert not ours.native_fp8(86)
    assert ours.processors(CPU) == 1


def test_the_environment_forces_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ours.FORCE_ARCH, "80")
    assert ours.architecture(CPU) == 80


@pytest.mark.parametrize("value", ["sm80", "8.0", "79", "-80"])
def test_what_names_no_architecture_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ours.FORCE_ARCH, value)
    with pytest.raises(ValueError, match=r"^DSA_INDEXER_FORCE_ARCH: .* \(fix: 80, "):
        ours.architecture(CPU)
