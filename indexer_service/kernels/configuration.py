"""What a selected bit can depend on, so that two sides can tell that they select the same ones."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from indexer_service.kernels.checks import fault

CPU_REFERENCE = "cpu-reference"


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


_SETTINGS: Mapping[str, Mapping[str, str]] = {
    CPU_REFERENCE: {
        "arithmetic": "1",  # count up with any change to mqa_logits/reference.py that moves a bit
        "dot": "float64-exact",
        "head_sum": "float64-halving-tree",
        "score": "float32-rounded-once",
        "nan": "never-chosen",
        "ties": "lowest-index",
        "order": "ascending-index",
    },
}


def configuration(engine: str = CPU_REFERENCE) -> Configuration:
    """The configuration of one of this version's engines.

    Raises:
        ValueError: there is no such engine.
    """
    if engine not in _SETTINGS:
        raise fault("engine", f"{engine!r} is unknown", f"one of: {', '.join(_SETTINGS)}")
    return Configuration(engine, _SETTINGS[engine])
