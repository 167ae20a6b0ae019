"""Steps of a worker on a GPU, for Triton's interpreter; `device_step_plants` runs them."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from tests.attention_worker.device_step_bench import DECODE, MANY_ROWS, SHAPE, expect, run, worker

# isort: split
from attention_worker import device_handoff
from attention_worker.device_handoff import DeviceHandoff
from ipc_handoff.device_layout import AnswersWord, StagingWord
from ipc_handoff.findings import FindingKind
from ipc_handoff.kernels.words import WorkerState
from tests.attention_worker.hand_service import sources, with_offsets


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
        (ended,) = made.found.findings
        assert (ended.kind, ended.step) == (FindingKind.WAIT_ENDED, 2)
        assert ended.seen == "the service gave up 1 steps"
        assert not attachment.detached_because


def cancelled_behind_a_newer_one() -> None:
    """The word holds the newest step that was given up: posted ahead, and given up as well."""
    with worker() as (made, steps):
        attachment = made.attach()

        def give_up(ordinal: int, step: int) -> None:
            if step == 2:
                attachment.bank.set_answers_word(AnswersWord.CANCELLED, step + 1)
            elif step != 3:
                made.answer(ordinal, step)

        made.turn = give_up
        expect(run(made, steps.case(1)), "service")
        for step in (2, 3):
            expect(run(made, steps.case(step)), "inline")
            found = made.steps.statistics.cancelled_steps
            assert found == step - 1, f"{found} steps counted as cancelled after step {step}"
        expect(run(made, steps.case(4)), "service")
        found = made.steps.statistics
        layers = len(SHAPE.layers)
        assert (found.answered_layers, found.inline_layers) == (2 * layers, 2), found
        assert made.rung == [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1)]
        assert made.steps._attachment is attachment and not attachment.detached_because
        assert attachment.bank.staging_word(StagingWord.DETACHED) == 0


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
        (ended,) = made.found.findings
        assert (ended.kind, ended.step) == (FindingKind.WAIT_ENDED, 2)
        assert ended.seen == attachment.detached_because


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
    "cancelled, and a newer one too": cancelled_behind_a_newer_one,
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
