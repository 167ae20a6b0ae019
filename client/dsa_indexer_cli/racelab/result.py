"""What the race lab found."""

from dataclasses import dataclass, field


@dataclass
class Provoked:
    """One race, provoked many times.

    Attributes:
        name: of the race; kind: of the finding that must be told; detector: that must tell it.
        provoked, caught: how often.
        stages: "side: stage" of the findings that caught it.
        example: one of them, as its log line says it.
        milliseconds: mean of one provocation.
    """

    name: str
    kind: str
    detector: str
    provoked: int = 0
    caught: int = 0
    stages: list[str] = field(default_factory=list)
    example: str = ""
    milliseconds: float = 0.0

    @property
    def missed(self) -> int:
        return self.provoked - self.caught


@dataclass
class Clean:
    """Steps in which nothing raced.

    Attributes:
        steps: by sort.
        false_alarms: findings; examples: the first ones' log lines.
        compared: answers that were compared with the worker's own; wrong: those that differ.
        inline_layers: that the service did not answer.
        milliseconds: mean of one step.
    """

    steps: dict[str, int] = field(default_factory=dict)
    false_alarms: int = 0
    examples: list[str] = field(default_factory=list)
    compared: int = 0
    wrong: int = 0
    inline_layers: int = 0
    milliseconds: float = 0.0


@dataclass
class LabResult:
    """transport: cpu or cuda; detectors: the setting of both sides.

    Attributes:
        failed: what could not be run, and why; the rest was.
    """

    transport: str
    detectors: str
    failed: list[str] = field(default_factory=list)
    provoked: list[Provoked] = field(default_factory=list)
    clean: Clean = field(default_factory=Clean)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """All was run, nothing was missed, and there was no false alarm."""
        missed = any(race.missed or not race.provoked for race in self.provoked)
        return not (self.failed or missed or self.clean.false_alarms or self.clean.wrong)
