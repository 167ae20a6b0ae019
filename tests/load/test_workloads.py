"""Workload files: what they may say, what is refused, and what is drawn from them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from dsa_indexer_cli.load.distributions import Distribution
from dsa_indexer_cli.load.steps import Kind, SessionSteps, drawn_steps
from dsa_indexer_cli.load.workload import (
    Workload,
    WorkloadError,
    built_in,
    load_workload,
    parse_change,
)

DISTRIBUTION: TypeAdapter[Any] = TypeAdapter(Distribution)


@pytest.mark.parametrize("name", built_in())
def test_what_comes_with_the_program_can_be_used(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert workload.geometry.max_rows > 0


def test_the_command_names_what_comes_with_it() -> None:
    assert built_in() == ["decode", "deepseek", "mixed", "smoke", "soak"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[load]\nsesions = 2", "load.sesions: 2 cannot be used (fix: another name"),
        ("[load]\nsessions = 0", "load.sessions"),
        ('[load]\nmode = "ajar"', "load.mode"),
        ('[load]\nmode = "recorded"', "replay.file"),
        ("[model]\nheads = 17", "model.heads"),
        ('[steps]\nbatch = { kind = "uniform", low = 3, high = 2 }', "high 2 is below low 3"),
        ('[steps]\nbatch = { kind = "zipf" }', "steps.batch"),
        ('[steps]\nbatch = { kind = "choice", values = [1], weights = [0] }', "weights"),
        ("[steps]\nmix = { decode = 0 }", "one weight or more"),
        ("[steps", "valid TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_key(text: str, names: str, tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(text)
    with pytest.raises(WorkloadError) as refused:
        load_workload(str(file))
    assert names in str(refused.value) and "(fix: " in str(refused.value)
    assert str(refused.value)[0].isalpha()


def test_a_file_that_is_missing_names_what_there_is() -> None:
    with pytest.raises(WorkloadError, match="decode, deepseek, mixed, smoke, soak"):
        load_workload("nowhere.toml")


def test_changes_win_over_the_file() -> None:
    changes = dict(map(parse_change, ["load.seconds=2.5", 'steps.batch={kind="fixed", value=3}']))
    workload = load_workload("smoke", changes)
    assert workload.load.seconds == 2.5
    assert workload.steps.batch.most == 3
    assert workload.load.sessions == 8


@pytest.mark.parametrize("text", ["load.seconds", "=3", "load.seconds=", "load.seconds=x y"])
def test_a_change_that_is_none(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"fix: KEY=VALUE"):
        parse_change(text)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "fixed", "value": 7},
        {"kind": "uniform", "low": 2, "high": 9},
        {"kind": "lognormal", "median": 40, "sigma": 1.5, "low": 5, "high": 90},
        {"kind": "choice", "values": [1, 8], "weights": [1, 3]},
    ],
    ids=lambda values: values["kind"],
)
def test_nothing_is_drawn_beyond_the_most(values: dict[str, Any]) -> None:
    """Sessions agree with the service on it."""
    distribution = DISTRIBUTION.validate_python(values)
    chance = random.Random(3)
    drawn = [distribution.draw(chance) for _ in range(2000)]
    assert max(drawn) == distribution.most
    assert min(drawn) >= values.get("low", 1)


def test_a_lognormal_has_its_median() -> None:
    values = {"kind": "lognormal", "median": 1000, "sigma": 0.7, "low": 1, "high": 10**6}
    distribution, chance = DISTRIBUTION.validate_python(values), random.Random(3)
    drawn = sorted(distribution.draw(chance) for _ in range(4001))
    assert 930 < drawn[2000] < 1070


def test_steps_are_of_the_kinds_and_layers_that_were_asked_for() -> None:
    workload = Workload(
        **{
            "model": {"layers": 6, "index_share": 3, "top_k": 8, "page_size": 32},
            "steps": {
                "batch": {"kind": "uniform", "low": 1, "high": 3},
                "context": {"kind": "uniform", "low": 5, "high": 70},
                "prefill_rows": {"kind": "fixed", "value": 9},
                "rows_per_decode": 2,
                "mix": {"decode": 1, "mixed": 1, "prefill": 1},
            },
        }
    )
    steps = drawn_steps(workload, 1)
    assert steps.geometry.layers == (0, 3)
    seen = set()
    for number in range(60):
        planned = steps.step(number)
        planned.inputs.check(steps.geometry)
        seen.add(planned.kind)
        prefill = planned.inputs.requests - planned.inputs.decode_requests
        assert prefill == (planned.kind is not Kind.DECODE)
        assert bool(planned.inputs.decode_requests) == (planned.kind is not Kind.PREFILL)
        assert planned.inputs.rows == planned.inputs.decode_requests * 2 + prefill * 9
        q, weights = steps.query(number, 3, planned.inputs.rows)
        assert len(q) == len(weights) == planned.inputs.rows
    assert seen == set(Kind)


def test_a_step_and_the_next_differ() -> None:
    """So that an answer of the step before is a wrong one."""
    workload = load_workload("smoke")
    steps = drawn_steps(workload, 1)
    answers = set()
    for number in range(20):
        planned = steps.step(number)
        for layer in planned.layers:
            q, _ = steps.query(number, layer, planned.inputs.rows)
            answers.add(q.numpy().tobytes())
    assert len(answers) == 40


def test_tables_differ_and_only_the_latest_steps_are_kept() -> None:
    """A recording of hours must not fill the memory with tables."""
    steps = drawn_steps(load_workload("smoke"), 1)
    few = drawn_steps(load_workload("smoke"), 1)
    many = SessionSteps(few.geometry, list(few.shapes) * 4, 1, few.pages)
    tables = [many.step(number).inputs.block_table for number in range(len(many.shapes))]
    assert len(many._planned) < len(tables) / 3
    assert many.step(1) is not None and torch.equal(many.step(1).inputs.block_table, tables[1])
    assert {table.flatten()[0].item() for table in tables[:60]} != {tables[0].flatten()[0].item()}
    for table in tables:
        assert 0 <= int(table.min()) <= int(table.max()) < many.pages
        assert all(len(row.unique()) == len(row) for row in table)
    assert torch.equal(steps.step(5).inputs.block_table, few.step(5).inputs.block_table)
