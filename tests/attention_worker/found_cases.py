"""What kernels of a worker find and tell; `device_step_plants` runs it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.attention_worker.device_step_bench import DECODE, MANY_ROWS, SHAPE, expect, run, worker

# isort: split
from attention_worker import device_handoff, inline_kernels
from dsa_indexer_cli.racelab import batches
from dsa_indexer_cli.racelab.batches import Sort
from indexer_client import StepInputs
from ipc_handoff.findings import FindingKind
from ipc_handoff.generations import Generation
from ipc_handoff.kernels.words import WorkerState
from tests.attention_worker.hand_service import HandWorker, sources, with_offsets

LAYERS = SHAPE.layers
GEOMETRY = batches.geometry(heads=16, page_size=32, top_k=8, max_context=160)
CACHES = {
    layer: torch.zeros(batches.pages(GEOMETRY), 32, GEOMETRY.head_dim + 4, dtype=torch.uint8)
    for layer in GEOMETRY.layers
}

Rewrite = Callable[[StepInputs], StepInputs]


def _changed(field: str, place: tuple[int, ...], by: int) -> Rewrite:
    """One value of a step's tensors is another step's."""

    def rewrite(inputs: StepInputs) -> StepInputs:
        values = getattr(inputs, field).clone()
        values[place] += by
        return replace(inputs, **{field: values})

    return rewrite


def _begun(sort: Sort, rewrite: Rewrite, *, attached: bool) -> HandWorker:
    """A worker that has begun a step with such inputs, and looked at what was found."""
    made = HandWorker(GEOMETRY, CACHES)
    if attached:
        made.attach()
    inputs = batches.make(GEOMETRY, sort, torch.Generator().manual_seed(3))
    made.steps.begin_step(rewrite(with_offsets(inputs)))
    made.steps.close()
    return made


def rewritten(
    kind: FindingKind, sort: Sort, rewrite: Rewrite, row: int, *, attached: bool = True
) -> None:
    made = _begun(sort, rewrite, attached=attached)
    found = made.found.only
    assert (found.kind, found.step, found.stage, found.row) == (kind, 1, "dsa.stage", row)
    assert found.request is not None and found.request.startswith("request-")
    assert found.expected != found.seen


def clean() -> None:
    """Padded rows, several rows a request, prefill, only bounds: nothing is said."""
    sorts = (
        Sort(), Sort(1, padded=3, next_n=2), Sort(next_n=4, exact=False, tight=True),
        Sort(0, 3, exact=False), Sort(2, 2, next_n=3),
    )  # fmt: skip
    for sort in sorts:
        for attached in (True, False):
            made = _begun(sort, lambda inputs: inputs, attached=attached)
            assert not made.found.findings, (sort, made.found.findings)


def stale_answer(held: Generation) -> None:
    """What was rung and is not there is computed here; the attachment goes on."""
    with worker() as (made, steps):
        attachment = made.attach()
        expect(run(made, steps.case(1)), "service")

        def ring_only(ordinal: int, step: int) -> None:
            made.answer(ordinal, step)
            attachment.bank.generation(step).fill_(held.word)

        made.turn = ring_only
        expect(run(made, steps.case(2)), "inline")
        made.turn = None
        expect(run(made, steps.case(3)), "service")
        found = made.found.only
        assert found.kind is FindingKind.STALE_ANSWER
        assert (found.step, found.epoch, found.layer) == (2, attachment.epoch, LAYERS[0])
        assert found.expected == f"step 2, layer {LAYERS[0]}"
        assert not attachment.detached_because


def overwritten_answer() -> None:
    """Another answer comes between the wait and the hand-back: the layer's rows are -1."""
    with worker(DECODE) as (made, steps):
        attachment = made.attach()
        case = steps.case(1, decode_only=True)
        real = device_handoff.wait

        def wait(memory: Any, **options: Any) -> None:
            real(memory, **options)
            attachment.bank.set_generation(1 + SHAPE.slots, 0)

        inputs = with_offsets(case.inputs)
        made.steps.begin_step(inputs)
        with patch.object(device_handoff, "wait", wait):
            found = made.forward(case.queries, inputs.rows)
        for out in found.values():
            assert bool((out == -1).all())
        made.steps.close()
        kinds = [(one.kind, one.layer) for one in made.found.findings]
        assert kinds == [(FindingKind.OVERWRITTEN_BEFORE_READ, layer) for layer in LAYERS]


def shared_indices() -> None:
    """The buffer of the step before, where no layer of this one has selected."""
    with worker() as (made, steps):
        made.attach()
        for number in (1, 2):
            case = steps.case(number)
            inputs = with_offsets(case.inputs)
            made.steps.begin_step(inputs)
            if number == 1:
                (_, *_, out) = made.forward(case.queries, inputs.rows).values()
            before = out.clone()
            made.steps.share(LAYERS[0], out)
            assert torch.equal(out, before if number == 1 else torch.full_like(out, -1))
        made.steps.close()
        found = made.found.only
        assert (found.kind, found.step) == (FindingKind.SHARED_INDEX_LEAK, 2)
        assert (found.expected, found.seen) == ("step 2", "step 1")


def shared_indices_inline() -> None:
    """A forward without a service selects as well."""
    with worker() as (made, steps):
        for number in (1, 2):
            case = steps.case(number)
            expect(run(made, case), "inline")
            found = made.forward(case.queries, case.inputs.rows)
            (_, *_, out) = found.values()
            made.steps.share(LAYERS[0], out)
            expect(sources(made, case, found, number), "inline")
        assert int(made.memory.state[WorkerState.SELECTED]) == 2
        made.steps.close()
        assert not made.found.findings


_EXACT, _BOUNDS = Sort(), Sort(next_n=3, exact=False)
_KINDS = FindingKind
TORN = partial(
    rewritten, _KINDS.TORN_INPUT, _EXACT, _changed("seq_lens", (1,), 1), 1, attached=False
)
POSITION = partial(rewritten, _KINDS.BAD_POSITION, _BOUNDS, _changed("seq_lens", (1,), 1), 3)
SLOT = partial(rewritten, _KINDS.BAD_SLOT, _BOUNDS, _changed("slots", (4,), 1), 4)
STALE = partial(stale_answer, Generation(2 - SHAPE.slots))
OVERWRITTEN = MANY_ROWS(overwritten_answer)

CASES: dict[str, Callable[[], None]] = {
    "found, a length of another step, without a service": TORN,
    "found, a table of another step, without a service": partial(
        rewritten, _KINDS.BAD_PAGE, _EXACT, _changed("block_table", (2, 0), 4096), 2,
        attached=False,
    ),
    "found, a length of another step that is inside its bound": POSITION,
    "found, a position of another step": partial(
        rewritten, _KINDS.BAD_POSITION, _EXACT, _changed("positions", (2,), -1), 2
    ),
    "found, a slot of another step": SLOT,
    "found, a slot of another step, without a service": partial(
        rewritten, _KINDS.BAD_SLOT, Sort(1, 2), _changed("slots", (0,), -3), 0, attached=False
    ),
    "found, nothing": clean,
    "found, an answer of another step": STALE,
    "found, an answer of another layer": partial(stale_answer, Generation(2, 1)),
    "found, an answer of another step, many rows": MANY_ROWS(STALE),
    "found, an overwritten answer": OVERWRITTEN,
    "found, shared indices of another step": shared_indices,
    "found, shared indices without a service": shared_indices_inline,
}  # fmt: skip


def _unchecked(real: Callable[..., None]) -> Callable[..., None]:
    def without(memory: Any, *arguments: Any, **options: Any) -> None:
        with patch.object(memory, "checks_generations", False):
            real(memory, *arguments, **options)

    return without


def _copied_only(real: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **options: real(*arguments, **{**options, "told": None})


def planted() -> Iterator[tuple[str, Callable[[], None], Any, str, Any]]:
    """Name, case, and what is replaced by what."""
    handoff, inline = device_handoff, inline_kernels
    copied = _copied_only(inline.copy_checked)
    for name, case in (("lengths", TORN), ("positions", POSITION), ("slots", SLOT)):
        yield f"{name} are not looked at", case, inline, "copy_checked", copied
    yield "any answer taken that was rung", STALE, handoff, "wait", _unchecked(handoff.wait)
    yield (
        "an answer not looked at again", OVERWRITTEN, handoff, "hand_back",
        _unchecked(handoff.hand_back),
    )  # fmt: skip
    yield "a selection of any step shared", shared_indices, handoff, "share", lambda *_, **__: None
