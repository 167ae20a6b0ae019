"""What the demo found."""

from dataclasses import dataclass, field
from pathlib import Path

from dsa_indexer_cli.demo.trace_table import StageTimes


@dataclass(frozen=True)
class Check:
    """One thing that was compared, and how close it came."""

    name: str
    ok: bool
    detail: str


@dataclass
class DemoResult:
    """Everything the demo found."""

    trace_file: Path
    checks: list[Check] = field(default_factory=list)
    stages: list[StageTimes] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def check(self, name: str, ok: bool, detail: str) -> None:
        self.checks.append(Check(name, ok, detail))
