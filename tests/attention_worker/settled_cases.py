"""Kernels before a wait that go by a word from before their layer: somebody computes each layer.

On a GPU the kernels of any layer but the first do not wait for that layer's staging to end: what
they look at must be final before it lets them start. The interpreter runs one kernel after the
other, so here they are given what the word was when staging began, which is before that.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from tests.attention_worker.device_step_bench import DECODE, run, worker

# isort: split
from attention_worker import device_handoff, inline_kernels
from attention_worker.inline_kernels import InlineKernels, InlineLayer
from ipc_handoff.device_layout import AnswersWord
from ipc_handoff.kernels.words import Decision
from tests.attention_worker.hand_service import HandWorker, sources, with_offsets
from tests.support.workloads import RandomSteps

LAYERS = (3, 7, 9)
SHAPE = replace(DECODE, layers=LAYERS)


@contextmanager
def captured_order() -> Iterator[tuple[HandWorker, RandomSteps]]:
    """A worker whose decode layers have their kernels where a GPU's graph has them."""
    stage, enqueue_step = device_handoff.stage, inline_kernels.enqueue_step
    seen: list[Any] = []

    def staged(memory: Any, *arguments: Any, **options: Any) -> None:
        seen[:] = [memory.detached.clone()]
        stage(memory, *arguments, **options)

    def enqueued(*arguments: Any, enabled: Any, settled: bool, **options: Any) -> None:
        enabled = seen[0] if settled else enabled
        enqueue_step(*arguments, enabled=enabled, settled=settled, **options)

    with ExitStack() as stack:
        for target, name, replacement in (
            (device_handoff, "stage", staged),
            (inline_kernels, "enqueue_step", enqueued),
            (InlineKernels, "can_rescue", lambda self, shape: shape.is_decode),
        ):
            stack.enter_context(patch.object(target, name, replacement))
        yield stack.enter_context(worker(SHAPE))


def unanswered(lost: int, word: int | None) -> None:
    """A wait ends without an answer: that layer and those behind it are computed here.

    Args:
        lost: ordinal of its layer.
        word: of the answers, that the service sets to the step; None: it falls silent.
    """
    with captured_order() as (made, steps):
        attachment = made.attach()

        def fall_silent(ordinal: int, step: int) -> None:
            if (step, ordinal) != (2, lost):
                made.answer(ordinal, step)
            elif word is not None:
                attachment.bank.set_answers_word(word, step)

        made.turn = fall_silent
        found = [run(made, steps.case(step, decode_only=True)) for step in (1, 2, 3)]
        assert found[0] == ["service"] * len(LAYERS)
        mixed = ["service"] * lost + ["inline"] * (len(LAYERS) - lost)
        assert found[1] == mixed, f"{found[1]} instead of {mixed}"
        third = "service" if word is not None else "inline"
        assert found[2] == [third] * len(LAYERS)
        assert bool(attachment.detached_because) is (word is None)


def without_a_step_after_an_answered_one() -> None:
    """Only the first layer's staging knows of it."""
    with captured_order() as (made, steps):
        made.attach()
        for step in (1, 2):
            case = steps.case(step, decode_only=True)
            assert run(made, case) == ["service"] * len(LAYERS)
            again = made.forward(case.queries, case.inputs.rows)
            found = sources(made, case, again, step)
            assert found == ["inline"] * len(LAYERS), f"{found} in a forward without a step"


def answered_after_inline_ones() -> None:
    """Nothing is computed here as well, beside the service, from the first layer on."""
    with captured_order() as (made, steps):
        case = steps.case(1, decode_only=True)
        made.steps.begin_step(with_offsets(case.inputs))
        made.forward(case.queries, case.inputs.rows)
        made.attach()
        case = steps.case(2, decode_only=True)
        made.steps.begin_step(with_offsets(case.inputs))
        with (
            patch.object(device_handoff, "FEW_ROWS", 0),
            patch.object(device_handoff, "hand_back"),
            patch.object(InlineLayer, "answer_or_rescue", lambda self, memory, ordinal: False),
        ):
            for out in made.forward(case.queries, case.inputs.rows).values():
                assert bool((out == -2).all()), "inline kernels have written"


CASES: dict[str, Callable[[], None]] = {
    **{
        f"settled, {name} in layer {lost}": partial(unanswered, lost, word)
        for name, word in (("stalled", None), ("cancelled", AnswersWord.CANCELLED))
        for lost in range(len(LAYERS))
    },
    "settled, without a step after an answered one": without_a_step_after_an_answered_one,
    "settled, answered after inline ones": answered_after_inline_ones,
}


def _told_by_staging_alone(real: Callable[..., None]) -> Callable[..., None]:
    """The wait, without its store of what the layers behind go by."""

    def wait(memory: Any, **options: Any) -> None:
        before = memory.decision[Decision.DETACHED].clone()
        real(memory, **options)
        memory.decision[Decision.DETACHED] = before

    return wait


def _first_as_any_other(self: InlineLayer, detached: Any, *, first: bool) -> None:
    self._select(detached, settled=True)


def planted() -> Iterator[tuple[str, Callable[[], None], Any, str, Any]]:
    """Name, case, and what is replaced by what."""
    told_late = _told_by_staging_alone(device_handoff.wait)
    for name, word in (("stalled", None), ("cancelled", AnswersWord.CANCELLED)):
        yield (
            f"{name}, and the next layer's kernels are not told", partial(unanswered, 1, word),
            device_handoff, "wait", told_late,
        )  # fmt: skip
    for case in (without_a_step_after_an_answered_one, answered_after_inline_ones):
        yield (
            f"the first layer does not wait for its staging: {case.__name__}", case, InlineLayer,
            "before_the_wait", _first_as_any_other,
        )  # fmt: skip
