"""What is interpreted of positions and slots: the rows that `indexer_client.positions` finds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dsa_indexer_cli.racelab.batches import places
from indexer_client import StepInputs
from indexer_client.positions import wrong_rows
from indexer_service.kernels.device_inputs import (
    REASONS,
    DeviceInputs,
    copy_checked,
    numbers_size,
    pack_numbers,
)
from indexer_service.kernels.row_places import WRONG_POSITION, WRONG_SLOT, Told
from ipc_handoff.kernels.found import Contradiction, Found, tell_found
from tests.gates import watch
from tests.gates.kernels import Run

PAGE, PAGES, STEP, BUCKET = 32, 80, 2**40 + 7, 6
EACH, LENGTHS = [2, 2, 2, 600], [90, 0, 33, 640]
"""A request of padding is among them, and one with more rows than are looked at together."""


def _step(changed: Callable[[StepInputs], None], rows_of: list[int] = EACH) -> StepInputs:
    offsets = [0, *accumulate(rows_of)]
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[: 4 * 20]
    table = table.view(4, 20).to(torch.int32)
    positions, slots = places(rows_of, LENGTHS, table, PAGE)
    made = StepInputs(
        query_start=torch.tensor(offsets, dtype=torch.int32),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32), block_table=table, rows=offsets[-1],
        decode_requests=3, rows_per_decode=2, max_length=640, exact_query_start=offsets,
        positions=positions, slots=slots,
    )  # fmt: skip
    changed(made)
    return made


def _found(inputs: StepInputs, *, faults: bool = True) -> list[tuple[int, ...]]:
    numbers = torch.zeros(numbers_size(BUCKET), dtype=torch.int32)
    pack_numbers(
        numbers, rows=inputs.rows, requests=inputs.requests, decode_requests=3, rows_per_decode=2,
        max_length=640, exact_lengths=None, exact_offsets=inputs.exact_query_start,
    )  # fmt: skip
    found = Found(torch.device("cpu"))
    watch.also_allowed[:] = [found.count, found.entries]
    told = Told(
        tell_found, (found.count, found.entries), torch.tensor([STEP]), inputs.positions,
        inputs.slots, faults,
    )  # fmt: skip
    copy_checked(
        DeviceInputs(BUCKET, 20, torch.device("cpu")), numbers, inputs.query_start,
        inputs.seq_lens, inputs.block_table, bucket=BUCKET, pages=PAGES, page_size=PAGE, told=told,
    )  # fmt: skip
    entries = list(found.new())
    assert all(entry.step == STEP and entry.ordinal == -1 for entry in entries)
    return sorted((one.kind, one.row, one.request, one.expected, one.seen) for one in entries)


def _as_on_the_host(changed: Callable[[StepInputs], None], count: int) -> None:
    """At most one row a request, as positions are told before slots."""
    inputs = _step(changed)
    wrong = wrong_rows(inputs, PAGE)
    expected = [(WRONG_POSITION, *row) for row in wrong.positions]
    told = {row.request for row in wrong.positions}
    expected += [(WRONG_SLOT, *row) for row in wrong.slots if row.request not in told]
    assert len(expected) == count
    assert _found(inputs) == sorted(expected)


def _one_of_them(name: str) -> None:
    """The engine gives slots or positions alone."""
    inputs = _step(_set(name, 400, 5))
    other = "slots" if name == "positions" else "positions"
    ((kind, row, request, _, seen),) = _found(replace(inputs, **{other: None}))
    right = WRONG_POSITION if name == "positions" else WRONG_SLOT
    assert (kind, row, request, seen) == (right, 400, 3, 5)


def _faults_come_first(told: bool) -> None:
    """A length that cannot be trusted says nothing of positions."""
    inputs = _step(_set("seq_lens", 0, 641))
    fault = (REASONS.index("length_out_of_bounds"), 0, 0, 640, 641)
    assert _found(inputs, faults=told) == ([fault] if told else [])


def _numbers_are_the_same() -> None:
    assert [kind.value for kind in Contradiction][:7] == list(range(1, 8))
    names = [reason.upper() for reason in REASONS[1:]]
    assert [kind.name for kind in Contradiction][: len(names)] == names
    assert (WRONG_POSITION, WRONG_SLOT) == (Contradiction.POSITION, Contradiction.SLOT)


def _set(name: str, place: int, value: int) -> Callable[[StepInputs], None]:
    def change(inputs: StepInputs) -> None:
        tensor: Tensor = getattr(inputs, name)
        tensor[place] = value

    return change


def _nothing(inputs: StepInputs) -> None:
    pass


_CASES: dict[str, Callable[[], None]] = {
    "right": partial(_as_on_the_host, _nothing, 0),
    "a position": partial(_as_on_the_host, _set("positions", 1, 7), 1),
    "a position far behind": partial(_as_on_the_host, _set("positions", 604, -1), 1),
    "a slot": partial(_as_on_the_host, _set("slots", 4, 3), 1),
    "a slot far behind": partial(_as_on_the_host, _set("slots", 605, 2**40), 1),
    "a slot of nowhere": partial(_as_on_the_host, _set("slots", 5, -1), 0),
    "a slot of padding": partial(_as_on_the_host, _set("slots", 2, 9), 0),
    "a length of another step": partial(_as_on_the_host, _set("seq_lens", 3, 639), 1),
    "a page of another step": partial(
        _as_on_the_host, lambda inputs: inputs.block_table[0].add_(1).remainder_(PAGES), 1
    ),
    "positions alone": partial(_one_of_them, "positions"),
    "slots alone": partial(_one_of_them, "slots"),
    "a fault comes first": partial(_faults_come_first, True),
    "a fault that another one tells": partial(_faults_come_first, False),
    "numbers are the same": _numbers_are_the_same,
}

RUNS = [Run(f"row places, {name}", check) for name, check in _CASES.items()]
