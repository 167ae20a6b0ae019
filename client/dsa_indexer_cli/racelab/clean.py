"""Clean steps of every sort: a detector that says anything of them is wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsa_indexer_cli.racelab.batches import Sort
from dsa_indexer_cli.racelab.bench import GEOMETRY, SHARING_LAYER, Bench
from indexer_client import StepInputs

_FIRST = GEOMETRY.layers[0]
_BATCHES = 100
# An answer in so many steps is compared with the same selection computed in the worker.
_COMPARED = 50

_Step = Callable[[Bench, StepInputs], int]


@dataclass(frozen=True)
class CleanSort:
    """batches: what its steps are made of, by turns; run: one step; returns its number."""

    name: str
    batches: tuple[Sort, ...]
    run: _Step


def whole(bench: Bench, inputs: StepInputs) -> int:
    """Every layer in turn, and one that shares."""
    with bench.session.step(inputs) as step:
        for layer in GEOMETRY.layers:
            out = bench.select(step, layer)
            step.share(SHARING_LAYER, out)
    return step.number


def _overlapping(bench: Bench, inputs: StepInputs) -> int:
    """The draft model's step begins and ends inside the target's."""
    with bench.session.step(inputs) as step:
        bench.select(step, _FIRST)
        with bench.draft.step(inputs) as draft:
            for layer in GEOMETRY.layers:
                bench.select(draft, layer)
        for layer in GEOMETRY.layers[1:]:
            bench.select(step, layer)
    return step.number


def _left_early(bench: Bench, inputs: StepInputs) -> int:
    """A forward that fails: the next step begins while the service waits for this one's layers."""
    with bench.session.step(inputs) as step:
        if step.number % 3:
            bench.select(step, _FIRST)
    return step.number


CLEAN = (
    CleanSort("decode", (Sort(), Sort(tight=True)), whole),
    CleanSort("padded rows", (Sort(2, padded=2), Sort(1, padded=3, next_n=2)), whole),
    CleanSort("speculative decoding", (Sort(next_n=2), Sort(next_n=4)), whole),
    CleanSort(
        "asynchronous speculative decoding: bounds only",
        (Sort(next_n=3, exact=False), Sort(next_n=2, exact=False, tight=True)),
        whole,
    ),
    CleanSort("prefill", (Sort(0, 2), Sort(0, 3, exact=False)), whole),
    CleanSort("decode beside prefill", (Sort(2, 2), Sort(1, 2, next_n=3, exact=False)), whole),
    CleanSort("two models' steps that overlap", (Sort(), Sort(2, 1)), _overlapping),
    CleanSort("steps left early", (Sort(), Sort(next_n=2, exact=False)), _left_early),
)


class CleanSteps:
    """Runs them by turns.

    Attributes:
        run: how many, by name.
        wrong: answers that were compared and differ; compared: how many were.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._inputs = {
            clean.name: [bench.batch(sort) for sort in clean.batches for _ in range(_BATCHES)]
            for clean in CLEAN
        }
        self.run = dict.fromkeys(self._inputs, 0)
        self.compared = self.wrong = 0

    def step(self, number: int) -> None:
        """The n-th one."""
        clean = CLEAN[number % len(CLEAN)]
        turn = self.run[clean.name]
        inputs = self._inputs[clean.name]
        clean.run(self._bench, inputs[turn % len(inputs)])
        self.run[clean.name] += 1
        if number % _COMPARED == 0:
            self._compare(inputs[turn % len(inputs)])

    def _compare(self, inputs: StepInputs) -> None:
        bench, query = self._bench, self._bench.query(inputs.rows)
        out, expected = torch.empty(2, inputs.rows, GEOMETRY.top_k, dtype=torch.int32)
        with bench.session.step(inputs, [_FIRST]) as step:
            step.select(_FIRST, *query, out=out)
        bench.inline(_FIRST, *query, inputs, expected)
        self.compared += 1
        self.wrong += not torch.equal(out, expected)
