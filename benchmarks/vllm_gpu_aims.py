"""What the vLLM comparison is to reach, and what was measured of it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_gpu_compare import Found

NATIVE = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
_REMOTE, _REMOTE_LONG, _LONG = 1.06, 1.03, 65536
_MORE_SECONDS = 5.0


@dataclass(frozen=True)
class Aim:
    """Attributes:
    what: is compared, and in which row.
    measured: a ratio of GPU times, or seconds.
    reach: the most that it may be; None: it is only to be stated.
    """

    what: str
    measured: float
    reach: float | None

    def __str__(self) -> str:
        if self.reach is None:
            return f"{self.what}: {self.measured}"
        verdict = "reached" if self.measured <= self.reach else "MISSED"
        return f"{self.what}: {self.measured} (at most {self.reach}: {verdict})"


def aims(phases: Mapping[str, Found]) -> list[Aim]:
    """Of the phases that were run; cases that failed have none."""
    return [*_of_times(phases.get("times", {})), *_of_starts(phases.get("start", {}))]


def as_records(found: list[Aim]) -> list[dict[str, Any]]:
    return [asdict(each) for each in found]


def _of_times(found: Found) -> Iterator[Aim]:
    gpu = {
        name: {row: kinds["gpu"] for row, kinds in each["milliseconds"].items() if "gpu" in kinds}
        for name, each in found.items()
        if "milliseconds" in each
    }
    inline = gpu.get("inline", {})
    for row, mine in inline.items():
        native = [gpu[name][row] for name in NATIVE if row in gpu.get(name, {})]
        if native:
            yield Aim(f"[{row}] inline / the better native", _ratio(mine, min(native)), 1.0)
        if row in gpu.get("remote", {}):
            reach = _REMOTE_LONG if int(row.split(" x ")[1]) >= _LONG else _REMOTE
            yield Aim(f"[{row}] remote / inline", _ratio(gpu["remote"][row], mine), reach)
        if row in gpu.get("inline, no MPS", {}):
            without = gpu["inline, no MPS"][row]
            yield Aim(f"[{row}] inline with MPS / without", _ratio(mine, without), None)


def _of_starts(found: Found) -> Iterator[Aim]:
    seconds = {
        name: each["start_seconds"] for name, each in found.items() if "start_seconds" in each
    }
    base = seconds.pop("without the plugin", None)
    if base is not None:
        for name, each in seconds.items():
            reach = None if name == "inline, first" else _MORE_SECONDS
            yield Aim(f"start, {name}: seconds more", round(each - base, 1), reach)


def _ratio(one: float, other: float) -> float:
    return round(one / other, 4)
