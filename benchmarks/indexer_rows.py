"""The benchmark's rows: each checks what it is about to time, then times all that can do the work.

A row is a JSON object: its shape, "µs" (median, least and most of the rounds, by name), "checks"
(what was compared and how far off it was), "wrong" (ours that failed a check or could not run) and
"absent" (peers that could not take part, and why).
"""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from indexer_inputs import Call, form
from timing import ROUNDS, Replay, captured, eager, in_turns
from torch import Tensor

TOPK = ("cooperative", "persistent", "per row")
CHAINS = tuple(f"DeepGEMM + {name}" for name in TOPK)
"""vLLM's top-k, alone and behind DeepGEMM's logits."""

RIGHT = 0.99
"""A peer that chose fewer of float64's keys did other work than ours. (Rounding loses a few.)"""

FORMS = {"fp8": None, "sm80": "80"}
"""Our kernels' forms, and the architecture that brings each about."""


@dataclass
class Row:
    """One shape: candidates are added, then timed in turns.

    Attributes:
        calls: how many a graph makes.
        before: runs ahead of every graph, outside its time.
        rewind: runs ahead of every check: undoes what `before` did to the inputs of call 0.
    """

    shape: dict[str, Any]
    calls: int
    before: Callable[[], None] | None = None
    rewind: Callable[[], None] = lambda: None
    checks: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    _replays: dict[str, Replay] = field(default_factory=dict)

    def ours(
        self,
        name: str,
        call: Call,
        answer: Tensor | None,
        check: Callable[[], None] | None = None,
        arch: str | None = None,
    ) -> None:
        """Adds ours, if `check` raises nothing and a graph fills `answer` as a call does."""
        try:
            with form(arch):
                if check:
                    self.rewind()
                    check()
                replay = captured(call, self.calls, before=self.before)
                if answer is not None:
                    replay()
                    in_graph = answer.clone()
                    call(self.calls - 1)
                    need(torch.equal(answer, in_graph), "another answer in a graph than outside")
                self._replays[name] = replay
        except Exception as error:  # the other rows are still worth their time
            self.wrong[name] = in_short(error)
            stop_if_dead(f"{self.shape}: {name}: {in_short(error)}")

    def peer(
        self, name: str, make: Callable[[], Call], check: Callable[[Call], None] | None = None
    ) -> None:
        """Adds a peer, if it is there and takes this shape."""
        try:
            call = make()
            if check:
                self.rewind()
                check(call)
            self._replays[name] = captured(call, self.calls, before=self.before)
        except Exception as error:  # missing, or does not support the shape
            self.absent[name] = in_short(error)
            stop_if_dead(f"{self.shape}: {name}: {in_short(error)}")

    def waits(self, name: str, call: Call) -> None:
        """Adds ours that wait for the GPU and cannot be captured, under the host's clock."""
        try:
            self._replays[name] = eager(call, self.calls)
        except Exception as error:
            self.wrong[name] = in_short(error)
            stop_if_dead(f"{self.shape}: {name}: {in_short(error)}")

    def done(self, rounds: int = ROUNDS) -> dict[str, Any]:
        """Times everything; returns the row."""
        times = in_turns(self._replays, rounds)
        self._replays.clear()
        return {
            **self.shape,
            "µs": {name: [round(value, 3) for value in astuple(t)] for name, t in times.items()},
            "checks": self.checks,
            "wrong": self.wrong,
            "absent": self.absent,
        }


class DeadGPU(Exception):
    """A kernel failed: nothing that this process could still measure would mean anything."""


def stop_if_dead(after: str) -> None:
    """Raises DeadGPU if no kernel runs any more."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeadGPU(after) from error


def need(right: bool, what: str) -> None:
    """A check of ours."""
    if not right:
        raise ValueError(what)


def medians(row: dict[str, Any]) -> dict[str, float]:
    """µs by name."""
    return {name: times[0] for name, times in row["µs"].items()}


def best(row: dict[str, Any], names: Iterable[str]) -> str | None:
    """The fastest of these that was timed."""
    times = medians(row)
    return min((name for name in names if name in times), key=times.__getitem__, default=None)


def decode_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of one row a request, then those of several."""
    return [*results.get("decode", ()), *results.get("drafts", ())]


def share_of_right_keys(row: dict[str, Any], chain: str) -> float:
    """What a peer chose of float64's choice; 1 if that was not looked at."""
    share: float = row["checks"].get(f"{chain}: float64's choice", 1.0)
    return share


def best_is_right(row: dict[str, Any]) -> bool:
    """Whether the fastest peer chose as it should."""
    name = best(row, CHAINS)
    return name is None or share_of_right_keys(row, name) >= RIGHT


def in_one_graph(row: dict[str, Any]) -> float | None:
    """µs of DeepGEMM's logits and the best of vLLM's top-k, captured together."""
    name = best(row, CHAINS)
    return medians(row)[name] if name else None


def summed(row: dict[str, Any]) -> float | None:
    """µs of DeepGEMM's logits alone and the best of vLLM's top-k alone, summed."""
    times, quickest = medians(row), best(row, TOPK)
    logits = times.get("DeepGEMM logits")
    return logits + times[quickest] if logits and quickest else None


def in_short(error: Exception) -> str:
    """Kind, and begin and end of its message."""
    said = str(error).strip()
    return (
        f"{type(error).__name__}: {said if len(said) < 400 else said[:200] + ' ... ' + said[-200:]}"
    )


def free() -> None:
    """Gives back what the last row's graphs held."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
