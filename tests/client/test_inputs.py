"""What a step refuses before anything is sent: ValueErrors that name the field."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from indexer_client import ClientSettings, Session, StepInputs
from tests.support.workloads import Case, RandomSteps, Shape

SHAPE = Shape(layers=(2, 5, 9), requests=3, context=150)


@pytest.fixture
def steps() -> Iterator[RandomSteps]:
    made = RandomSteps(SHAPE, 1)
    yield made
    made.close()


@pytest.fixture
def session(steps: RandomSteps, tmp_path: Path) -> Iterator[Session]:
    """Without a service: the checks must not depend on one."""
    settings = ClientSettings(address=f"unix:{tmp_path}/none.sock")
    with Session(steps.geometry, steps.k_caches, steps.fallback, settings=settings) as session:
        yield session


@pytest.fixture
def case(steps: RandomSteps) -> Case:
    return steps.case(1)


def _wide(inputs: StepInputs) -> torch.Tensor:
    return torch.zeros(len(inputs.seq_lens), SHAPE.geometry.table_width + 1, dtype=torch.int32)


def _decodes(inputs: StepInputs, rows: int) -> dict[str, Any]:
    """Every request decodes."""
    return {"decode_requests": len(inputs.seq_lens), "rows_per_decode": rows}


def _exact(inputs: StepInputs, last: int) -> dict[str, Any]:
    return {"exact_seq_lens": [*[1] * (len(inputs.seq_lens) - 1), last]}


def _offsets(values: list[int]) -> dict[str, Any]:
    return {"exact_query_start": values}


def _numbers(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


BAD_INPUTS: dict[str, tuple[str, Callable[[StepInputs], dict[str, Any]]]] = {
    "no rows": ("rows", lambda i: {"rows": 0}),
    "too many rows": ("rows", lambda i: {"rows": SHAPE.geometry.max_rows + 1}),
    "too many requests": ("requests", lambda i: {"seq_lens": torch.ones(99, dtype=torch.int32)}),
    "no requests": ("requests", lambda i: {"seq_lens": torch.ones(0, dtype=torch.int32)}),
    "a wide table": ("block_table", lambda i: {"block_table": _wide(i)}),
    "a flat table": ("block_table", lambda i: {"block_table": i.block_table[0]}),
    "another table": ("block_table", lambda i: {"block_table": i.block_table[:0]}),
    "a table of 64 bit": ("block_table", lambda i: {"block_table": i.block_table.long()}),
    "lengths of 64 bit": ("seq_lens", lambda i: {"seq_lens": i.seq_lens.long()}),
    "two-dimensional lengths": ("seq_lens", lambda i: {"seq_lens": i.seq_lens[:, None]}),
    "short offsets": ("query_start", lambda i: {"query_start": i.query_start[:-1]}),
    "offsets as floats": ("query_start", lambda i: {"query_start": i.query_start.float()}),
    "a negative bound": ("max_length", lambda i: {"max_length": -1}),
    "a bound of nothing": ("max_length", lambda i: {"max_length": 0, "exact_seq_lens": None}),
    "a bound beyond the table": ("max_length", lambda i: {"max_length": SHAPE.context + 1}),
    "fewer than no decodes": ("decode_requests", lambda i: {"decode_requests": -1}),
    "more decodes than requests": ("decode_requests", lambda i: {"decode_requests": 99}),
    "decodes without rows": ("rows_per_decode", lambda i: _decodes(i, 0)),
    "decodes of nine rows": ("rows_per_decode", lambda i: _decodes(i, 9)),
    "a negative number a decode": ("rows_per_decode", lambda i: {"rows_per_decode": -1}),
    "rows for nobody": ("rows", lambda i: {**_decodes(i, 1), "rows": len(i.seq_lens) + 1}),
    "too few rows": ("rows", lambda i: {**_decodes(i, 8), "rows": 1}),
    "exact lengths of others": ("exact_seq_lens", lambda i: {"exact_seq_lens": [1] * 9}),
    "no exact lengths": ("exact_seq_lens", lambda i: {"exact_seq_lens": []}),
    "a negative exact length": ("exact_seq_lens", lambda i: _exact(i, -1)),
    "an exact length over the bound": ("exact_seq_lens", lambda i: _exact(i, i.max_length + 1)),
    "positions of 32 bit": ("positions", lambda i: {"positions": i.query_start}),
    "too few positions": ("positions", lambda i: {"positions": _numbers(i.rows - 1)}),
    "too few slots": ("slots", lambda i: {"slots": _numbers(i.rows - 1)}),
    "slots in two dimensions": ("slots", lambda i: {"slots": _numbers(i.rows)[None]}),
    "names of other requests": ("request_ids", lambda i: {"request_ids": ["a"] * 9}),
    "exact offsets of others": ("exact_query_start", lambda i: _offsets([0])),
    "exact offsets that run backwards": (
        "exact_query_start",
        lambda i: _offsets(i.query_start.tolist()[::-1]),
    ),
    "exact offsets with a row too many": (
        "exact_query_start",
        lambda i: _offsets([*i.query_start.tolist()[:-1], i.rows + 1]),
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_refused_by_name(
    name: str, session: Session, case: Case
) -> None:
    field, change = BAD_INPUTS[name]
    with pytest.raises(ValueError, match=rf"^{field}: .*\(fix: "):
        session.step(replace(case.inputs, **change(case.inputs)))


@pytest.mark.parametrize(
    "layers", [(), (3,), (2, 2), (2, 5, 9, 2)], ids=["none", "unknown", "twice", "one too many"]
)
def test_layers_that_cannot_be_planned_are_refused(
    layers: tuple[int, ...], session: Session, case: Case
) -> None:
    with pytest.raises(ValueError, match=r"^layers: .*\(fix: "):
        session.step(case.inputs, layers)


def _bad_tensors(case: Case, top_k: int) -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    query, rows = case.queries[2], case.inputs.rows
    q, weights = query.q, query.weights
    out = torch.empty(rows, top_k, dtype=torch.int32)
    good = {"q": q, "weights": weights, "out": out}
    return {
        "q of floats": ("q", good | {"q": q.float()}),
        "q with a row too many": ("q", good | {"q": torch.cat([q, q[:1]])}),
        "q with half the heads": ("q", good | {"q": q[:, ::2]}),
        "q with another head size": ("q", good | {"q": q[:, :, :64]}),
        "weights in half": ("weights", good | {"weights": weights.half()}),
        "weights of another shape": ("weights", good | {"weights": weights[:, :1]}),
        "out of 64 bit": ("out", good | {"out": out.long()}),
        "out with fewer columns": ("out", good | {"out": out[:, 1:]}),
        "out with fewer rows": ("out", good | {"out": out[:0]}),
    }


@pytest.mark.parametrize(
    "name",
    [
        "q of floats",
        "q with a row too many",
        "q with half the heads",
        "q with another head size",
        "weights in half",
        "weights of another shape",
        "out of 64 bit",
        "out with fewer columns",
        "out with fewer rows",
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    name: str, session: Session, case: Case
) -> None:
    field, tensors = _bad_tensors(case, SHAPE.top_k)[name]
    with (
        session.step(case.inputs, case.layers) as step,
        pytest.raises(ValueError, match=rf"^{field}: .*\(fix: "),
    ):
        step.select(2, tensors["q"], tensors["weights"], out=tensors["out"])


@pytest.mark.parametrize("layer", [5, 9, 3, -1])
def test_a_layer_out_of_order_is_refused(layer: int, session: Session, case: Case) -> None:
    query, out = case.queries[2], torch.empty_like(case.expected[2])
    with session.step(case.inputs, (2, 5, 9)) as step:
        with pytest.raises(ValueError, match=r"^layer: "):
            step.select(layer, query.q, query.weights, out=out)
        # The refusal changed nothing.
        step.select(2, query.q, query.weights, out=out)
        assert torch.equal(out, case.expected[2])
        with pytest.raises(ValueError, match=r"^layer: "):
            step.select(2, query.q, query.weights, out=out)


def test_q_may_be_e4m3_or_its_bytes_and_have_any_strides(session: Session, case: Case) -> None:
    query, out = case.queries[2], torch.empty_like(case.expected[2])
    wide = torch.zeros(*query.q.shape[:2], 256, dtype=torch.uint8)
    wide[:, :, ::2] = query.q
    for q in (query.q, query.q.view(torch.float8_e4m3fn), wide[:, :, ::2]):
        with session.step(case.inputs, [2]) as step:
            step.select(2, q, query.weights, out=out)
        assert torch.equal(out, case.expected[2])
        out.fill_(-2)


def test_a_missing_k_cache_is_refused_by_name(steps: RandomSteps) -> None:
    caches = {layer: cache for layer, cache in steps.k_caches.items() if layer != 5}
    with pytest.raises(ValueError, match=r"^k_caches: layer 5 is missing \(fix: "):
        Session(steps.geometry, caches, steps.fallback)


def test_exact_offsets_go_into_the_plan(case: Case) -> None:
    assert not case.inputs.plan(1, 2, (2,)).exact.query_start
    offsets = case.inputs.query_start.tolist()
    inputs = replace(case.inputs, exact_query_start=offsets)
    inputs.check(SHAPE.geometry)
    assert list(inputs.plan(1, 2, (2,)).exact.query_start) == offsets


def test_exact_offsets_must_give_every_decode_its_rows() -> None:
    inputs = StepInputs(
        query_start=torch.tensor([0, 2, 4, 5], dtype=torch.int32),
        seq_lens=torch.tensor([9, 9, 9], dtype=torch.int32),
        block_table=torch.zeros((3, 1), dtype=torch.int32),
        rows=5,
        decode_requests=2,
        rows_per_decode=2,
        max_length=9,
        exact_query_start=[0, 2, 4, 5],
    )
    inputs.check(SHAPE.geometry)
    with pytest.raises(ValueError, match=r"^exact_query_start: .*\(fix: 2 times 2 rows, "):
        replace(inputs, exact_query_start=[0, 1, 4, 5]).check(SHAPE.geometry)
