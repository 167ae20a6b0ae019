"""What a selected bit can depend on, so that two sides can tell that they select the same ones."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import torch

from indexer_service.kernels.architecture import architecture, native_fp8
from indexer_service.kernels.checks import fault

CPU_REFERENCE = "cpu-reference"
TRITON = "triton"


@dataclass(frozen=True)
class Configuration:
    """An engine and its settings. Service and worker attach only if their hashes are equal.

    Attributes:
        engine: name of the implementation.
        settings: all that can change a score's bits or which index is chosen, as text.
    """

    engine: str
    settings: Mapping[str, str]

    @property
    def hash(self) -> str:
        """sha256, in hex, of the canonical JSON of engine and settings."""
        content = {"engine": self.engine, "settings": dict(self.settings)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


_SELECTION = {"nan": "never-chosen", "ties": "lowest-index", "order": "ascending-index"}


def _cpu_reference(device: torch.device) -> dict[str, str]:
    return {
        "arithmetic": "1",  # count up with any change to mqa_logits/reference.py that moves a bit
        "dot": "float64-exact",
        "head_sum": "float64-halving-tree",
        "score": "float32-rounded-once",
    }


def _triton(device: torch.device) -> dict[str, str]:
    arch = architecture(device)
    return {
        "arithmetic": "1",  # count up with any change to mqa_logits' kernels that moves a bit
        "dot": "e4m3" if native_fp8(arch) else "fp16",
        # Which instruction multiplies, and in what order a compiler adds: tuned block sizes are
        # not here because they move no bit.
        "architecture": str(arch),
        "triton": version("triton"),
    }


_ENGINES: Mapping[str, Callable[[torch.device], dict[str, str]]] = {
    CPU_REFERENCE: _cpu_reference,
    TRITON: _triton,
}


def configuration(engine: str = CPU_REFERENCE, device: torch.device | str = "cpu") -> Configuration:
    """The configuration of one of this version's engines on a device.

    Raises:
        ValueError: there is no such engine.
    """
    if engine not in _ENGINES:
        raise fault("engine", f"{engine!r} is unknown", f"one of: {', '.join(_ENGINES)}")
    return Configuration(engine, _ENGINES[engine](torch.device(device)) | _SELECTION)
