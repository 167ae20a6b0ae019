"""What a check of `dsa-indexer doctor` found."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        ok: True, False, or None for something that is only said.
        detail: what was found.
        fix: what to change; empty when nothing is wrong.
        values: the same for machines, where there are numbers.
    """

    check: str
    ok: bool | None
    detail: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def split_fix(message: str) -> tuple[str, str]:
    """An error's text without its fix, and the fix; empty if it names none."""
    problem, _, fix = message.partition(" (fix: ")
    return problem, fix.removesuffix(")")
