"""What interpreted steps of a worker on a GPU are made with. Import it before any kernel."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import tests.gates.interpreter  # noqa: F401  (importing repairs the interpreter)
from attention_worker import device_handoff
from tests.attention_worker.hand_service import HandWorker, sources, with_offsets
from tests.support.workloads import Case, RandomSteps, Shape

SHAPE = Shape(layers=(3, 7), requests=3, next_n=2, prefill_rows=4, context=120, slots=2, top_k=8)
DECODE = replace(SHAPE, next_n=1)


MANY_ROWS = patch.object(device_handoff, "FEW_ROWS", 0)
"""Every forward is handed back by a kernel of its own."""


@contextmanager
def worker(shape: Shape = SHAPE, seed: int = 1) -> Iterator[tuple[HandWorker, RandomSteps]]:
    steps = RandomSteps(shape, seed)
    caches = {layer: cache.tensor for layer, cache in steps.k_caches.items()}
    yield HandWorker(steps.geometry, caches), steps


def run(made: HandWorker, case: Case, *, padding: int = 0) -> list[str]:
    """One step; where its layers came from."""
    inputs = with_offsets(case.inputs)
    number = made.steps.begin_step(inputs)
    found = made.forward(case.queries, inputs.rows, padding=padding)
    return sources(made, case, found, number)


def expect(found: list[str], wanted: str) -> None:
    assert found == [wanted] * len(SHAPE.layers), f"{found} instead of {wanted}"
