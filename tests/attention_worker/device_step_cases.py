"""Steps of a worker on a GPU, in Triton's interpreter, and the same with a guard taken out.

`python -m tests.attention_worker.device_step_cases` runs all and prints one JSON line a case: its
name and what went wrong, or null.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import torch

import tests.gates.interpreter  # noqa: F401  (importing repairs the interpreter)
from attention_worker import device_handoff, inline_kernels
from attention_worker.device_handoff import DeviceHandoff
from ipc_handoff.device_layout import AnswersWord, StagingWord
from ipc_handoff.kernels.words import Decision, WorkerState
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


def answered() -> None:
    with worker() as (made, steps):
        attachment = made.attach()
        for number in range(1, 6):
            case = steps.case(number)
            expect(run(made, case), "service")
            inputs = case.inputs
            bank = attachment.bank
            lengths = bank.staged(number, "seq_lens", 4 * inputs.requests).view(torch.int32)
            assert torch.equal(lengths, inputs.seq_lens)
            q = case.queries[SHAPE.layers[-1]].q
            assert torch.equal(bank.staged(number, "q", q.numel()), q.flatten())
            plan = attachment.posted[-1]
            assert (plan.step, plan.epoch) == (number, attachment.epoch)
            assert list(plan.exact.query_start) == inputs.query_start.tolist()
        assert made.steps.statistics.answered_layers == 10


def answered_by_the_service_alone() -> None:
    """What was answered is not computed here as well."""
    with worker() as (made, steps), MANY_ROWS, patch.object(device_handoff, "hand_back"):
        made.attach()
        case = steps.case(1)
        made.steps.begin_step(with_offsets(case.inputs))
        for out in made.forward(case.queries, case.inputs.rows).values():
            assert bool((out == -2).all()), "inline kernels have written"


def without_a_service() -> None:
    with worker() as (made, steps):
        for number in range(1, 5):
            expect(run(made, steps.case(number)), "inline")
        assert made.steps.statistics.answered_layers == 0


def cancelled() -> None:
    """The rest of the step is inline, and the attachment goes on."""
    with worker() as (made, steps):
        attachment = made.attach()

        def give_up(ordinal: int, step: int) -> None:
            if step == 2:
                attachment.bank.set_answers_word(AnswersWord.CANCELLED, step)
            else:
                made.answer(ordinal, step)

        made.turn = give_up
        expect(run(made, steps.case(1)), "service")
        expect(run(made, steps.case(2)), "inline")
        assert made.rung == [(1, 0), (1, 1), (2, 0)], "after giving up nothing is rung"
        expect(run(made, steps.case(3)), "service")
        assert made.steps.statistics.cancelled_steps == 1
        assert not attachment.detached_because


def stalled() -> None:
    """The first wait ends the attachment, for all that was enqueued and for the host."""
    with worker() as (made, steps):
        attachment = made.attach()
        expect(run(made, steps.case(1)), "service")
        made.turn = lambda ordinal, step: None
        expect(run(made, steps.case(2)), "inline")
        assert attachment.bank.staging_word(StagingWord.DETACHED) == 1
        expect(run(made, steps.case(3)), "inline")
        assert attachment.detached_because == "step 2, layer 3: no progress within the bound"
        assert made.caretaker.ended == [attachment]


def answers_of_another_step() -> None:
    """A word that holds another step's number is no answer."""
    with worker() as (made, steps):
        made.attach()
        expect(run(made, steps.case(1)), "service")
        made.turn = lambda ordinal, step: made.answer(ordinal, step - 1)
        expect(run(made, steps.case(2)), "inline")


def lost_is_not_published_for() -> None:
    """The host publishes ahead of the device: it does not know yet that a wait has given up."""
    with worker() as (made, steps):
        attachment = made.attach()
        made.turn = lambda ordinal, step: None
        expect(run(made, steps.case(1)), "inline")
        with patch.object(DeviceHandoff, "why_over", lambda self, attachment: None):
            expect(run(made, steps.case(2)), "inline")
        assert attachment.bank.staging_word(StagingWord.PUBLISHED) == 1
        assert made.rung == [(1, 0)]


def one_publication_one_forward() -> None:
    """A second forward, a replay without a step, is inline and rings nothing."""
    with worker() as (made, steps):
        made.attach()
        case = steps.case(1)
        expect(run(made, case), "service")
        found = made.forward(case.queries, case.inputs.rows)
        expect(sources(made, case, found, 1), "inline")
        assert made.rung == [(1, 0), (1, 1)]
        assert int(made.memory.state[WorkerState.ARMED]) == 0


def unposted_step_after_an_unused_one() -> None:
    """A publication that no forward took is not the next step's, which has no plan."""
    with worker() as (made, steps):
        attachment = made.attach()
        made.steps.begin_step(with_offsets(steps.case(1).inputs))
        attachment.is_full = True
        expect(run(made, steps.case(2)), "inline")
        assert made.rung == []
        assert attachment.detached_because == "plan: plan ring: full"


def another_bank() -> None:
    """After re-attachment the answers come from the new bank."""
    with worker() as (made, steps):
        first = made.attach()
        expect(run(made, steps.case(1)), "service")
        first.detach("the service left")
        second = made.attach()
        expect(run(made, steps.case(2)), "service")
        assert first.bank.staging_word(StagingWord.PUBLISHED) == 1
        assert second.bank.staging_word(StagingWord.PUBLISHED) == 2
        assert first.bank.marks == 1


def the_service_has_drained() -> None:
    with worker() as (made, steps):
        attachment = made.attach()
        expect(run(made, steps.case(1)), "service")
        attachment.bank.control.bells._drained.store(1)
        expect(run(made, steps.case(2)), "inline")
        assert attachment.detached_because == "the service has ended the session"


def _padded(*, remote: bool) -> None:
    """A captured batch is larger than the step: its rows behind get -1."""
    with worker(DECODE) as (made, steps):
        if remote:
            made.attach()
        most = DECODE.requests
        for number in range(1, 8):
            case = steps.case(number, decode_only=True)
            rows = case.inputs.rows
            inputs = with_offsets(case.inputs)
            step = made.steps.begin_step(inputs)
            made.steps.begin_inline(most)  # the shape that was captured
            found = made.forward(case.queries, rows, padding=most - rows)
            expect(sources(made, case, found, step), "service" if remote else "inline")


def padded_eager() -> None:
    with worker() as (made, steps):
        for number in range(1, 6):
            expect(run(made, steps.case(number), padding=2), "inline")


CASES: dict[str, Callable[[], None]] = {
    "answered": answered,
    "answered by the service alone": answered_by_the_service_alone,
    "without a service": without_a_service,
    "cancelled": cancelled,
    "stalled": stalled,
    "answers of another step": answers_of_another_step,
    "a lost attachment is not published for": lost_is_not_published_for,
    "one publication, one forward": one_publication_one_forward,
    "an unposted step after an unused one": unposted_step_after_an_unused_one,
    "another bank": another_bank,
    "the service has drained": the_service_has_drained,
    "padded, inline": partial(_padded, remote=False),
    "padded, answered": partial(_padded, remote=True),
    "padded, eager": padded_eager,
    "answered, many rows": MANY_ROWS(answered),
    "padded, answered, many rows": MANY_ROWS(partial(_padded, remote=True)),
    "stalled, many rows": MANY_ROWS(stalled),
}


def _always_answered(memory: Any, **options: Any) -> None:
    memory.decision.zero_()
    memory.decision[Decision.ANSWERED] = 1


def _armed_for_good(real: Callable[..., None]) -> Callable[..., None]:
    def stage(memory: Any, *arguments: Any, **options: Any) -> None:
        armed = memory.state[WorkerState.ARMED].clone()
        real(memory, *arguments, **options)
        memory.state[WorkerState.ARMED] = armed

    return stage


def _always_enabled(real: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **options: real(*arguments, **{**options, "enabled": None})


def _own_requests_only(real: Callable[..., None]) -> Callable[..., None]:
    return lambda inputs, numbers, start, lengths, *rest, **options: real(
        inputs, numbers, start, lengths, *rest, **{**options, "bucket": len(lengths)}
    )


def _another_number(real: Callable[..., None]) -> Callable[..., None]:
    numbers = count(10**6)
    return lambda *arguments, **options: real(
        *arguments, **{**options, "attachment": next(numbers)}
    )


def _first_bank() -> Callable[[Any], Any]:
    seen: list[Any] = []

    def bank(attachment: Any) -> Any:
        seen.append(attachment.bank)
        return seen[0]

    return bank


def _planted() -> Iterator[tuple[str, Callable[[], None], Any, str, Any]]:
    """Name, case, and what is replaced by what."""
    handoff, inline = device_handoff, inline_kernels
    always = _always_answered
    yield "stalled, taken for answered", MANY_ROWS(stalled), handoff, "wait", always
    yield "another step's answer taken", MANY_ROWS(answers_of_another_step), handoff, "wait", always
    yield (
        "inline kernels not switched off", answered_by_the_service_alone, inline, "enqueue_step",
        _always_enabled(inline.enqueue_step),
    )  # fmt: skip
    yield (
        "a publication that stays armed", one_publication_one_forward, handoff, "stage",
        _armed_for_good(handoff.stage),
    )  # fmt: skip
    yield (
        "an unused publication kept", unposted_step_after_an_unused_one, DeviceHandoff, "skip",
        lambda self: None,
    )  # fmt: skip
    yield (
        "published for a lost attachment", lost_is_not_published_for, handoff, "publish",
        _another_number(handoff.publish),
    )  # fmt: skip
    yield "the first bank for ever", another_bank, handoff, "_bank", _first_bank()
    yield (
        "only the step's requests cleared", CASES["padded, inline"], inline, "copy_checked",
        _own_requests_only(inline.copy_checked),
    )  # fmt: skip
    yield "padding left as it was", padded_eager, inline, "_NONE", -2
    yield (
        "a drained service not noticed", the_service_has_drained, DeviceHandoff, "why_over",
        lambda self, attachment: None,
    )  # fmt: skip
    yield (
        "what the device told not read", stalled, DeviceHandoff, "why_over",
        lambda self, attachment: None,
    )  # fmt: skip


def _with(case: Callable[[], None], target: Any, name: str, replacement: Any) -> None:
    with patch.object(target, name, replacement):
        case()


def main() -> None:
    runs = list(CASES.items())
    runs += [(f"planted: {name}", partial(_with, *rest)) for name, *rest in _planted()]
    for name, case in runs:
        wrong = None
        try:
            case()
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[-300:]}"
        print(json.dumps({"name": name, "error": wrong}), flush=True)


if __name__ == "__main__":
    main()
