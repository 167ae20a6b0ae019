"""The demo: green as it is, red with any planted fault."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsa_indexer_cli.demo.result import DemoResult
from dsa_indexer_cli.demo.run import run_demo
from dsa_indexer_cli.demo.trace_table import STAGES
from dsa_indexer_cli.main import app
from dsa_indexer_cli.trace.spans import read_trace_file
from indexer_client import Source
from indexer_client.step import Step
from ipc_handoff.stages import STEP_SPAN

COMMAND = str(Path(sys.executable).parent / "dsa-indexer")
STEPS = 10
LONGEST_SECONDS = 60.0
COMPARED = (
    "recorded decode: selection against vLLM's",
    "recorded decode: attention against FlashMLA's",
    "recorded prefill: selection against vLLM's",
    "varied steps: no two rows have the same answer",
    "varied steps: selection against the reference, bit for bit",
    "the service killed inside a step and started again",
    "the end: nothing stays mapped, no file is left",
    "every step that the service answered is one trace over both processes",
)


def _demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        # What a user has set for a service of their own is not for the demo.
        env={
            **os.environ,
            "COLUMNS": "250",
            "OTEL_SDK_DISABLED": "true",
            "DSA_INDEXER_TRACE_RATIO": "0.2",
            "DSA_INDEXER_LEASE_SECONDS": "-1",
        },
    )


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_the_command_ends_with_zero_only_if_every_comparison_holds(
    holds: bool, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*arguments: Any) -> DemoResult:
        result = DemoResult(tmp_path / "t")
        result.check("one", True, "")
        result.check("other", holds, "")
        return result

    monkeypatch.setattr("dsa_indexer_cli.demo.run.run_demo", run)
    assert CliRunner().invoke(app, ["demo"]).exit_code == status
    assert CliRunner().invoke(app, ["demo", "--json"]).exit_code == status


@pytest.mark.slow
def test_the_demo_says_what_it_compared_and_ends_with_zero(tmp_path: Path) -> None:
    result = _demo(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in COMPARED:
        (line,) = [line for line in result.stdout.splitlines() if name in line]
        assert " ok " in line
    for stage in (*STAGES, STEP_SPAN):
        assert f" {stage} " in result.stdout
    assert "150 of 150 selections" in result.stdout
    assert "300 different answers in 300 rows" in result.stdout
    assert "everything holds" in result.stdout
    trace = tmp_path / "dsa-indexer-demo.trace.jsonl"
    assert str(trace) in result.stdout.replace("\n", "")
    services = {span.service for span in read_trace_file(trace).spans}
    assert services == {"dsa-indexer-worker", "dsa-indexer-service"}


@pytest.mark.slow
def test_the_demo_tells_machines_the_same(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    result = _demo(tmp_path, "--json", "--steps", str(STEPS), "--trace-file", str(trace))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["trace_file"] == str(trace)
    assert tuple(check["name"] for check in found["checks"]) == COMPARED
    assert all(check["ok"] for check in found["checks"])
    assert {stage["stage"] for stage in found["stages"]} == {*STAGES, STEP_SPAN}
    assert 0 < found["seconds"] < 4 * LONGEST_SECONDS


HandBack = Callable[[Step, int, bool, torch.Tensor], Source]


def _one_step_old(hand_back: HandBack) -> HandBack:
    older: dict[tuple[Any, ...], torch.Tensor] = {}

    def planted(step: Step, layer: int, answered: bool, out: torch.Tensor) -> Source:
        source = hand_back(step, layer, answered, out)
        key = (layer, *out.shape)
        fresh = out.clone()
        out.copy_(older.get(key, fresh))
        older[key] = fresh
        return source

    return planted


def _one_layer_off(hand_back: HandBack) -> HandBack:
    last: list[torch.Tensor] = []

    def planted(step: Step, layer: int, answered: bool, out: torch.Tensor) -> Source:
        source = hand_back(step, layer, answered, out)
        fresh = out.clone()
        if last and last[0].shape == out.shape:
            out.copy_(last[0])
        last[:] = [fresh]
        return source

    return planted


def _one_row_off(hand_back: HandBack) -> HandBack:
    def planted(step: Step, layer: int, answered: bool, out: torch.Tensor) -> Source:
        source = hand_back(step, layer, answered, out)
        out.copy_(out.roll(1, dims=0))
        return source

    return planted


def _one_index_off(hand_back: HandBack) -> HandBack:
    """In one row of one step."""
    asked = []

    def planted(step: Step, layer: int, answered: bool, out: torch.Tensor) -> Source:
        source = hand_back(step, layer, answered, out)
        asked.append(layer)
        if len(asked) == 12:
            out[-1, 5] += 1
        return source

    return planted


def _run(folder: Path) -> DemoResult:
    return run_demo(folder / "t.jsonl", STEPS, lambda said: None)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_one_step_old, _one_layer_off, _one_row_off, _one_index_off])
def test_a_planted_fault_turns_the_demo_red(
    plant: Callable[[HandBack], HandBack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "hand_back", plant(Step.hand_back))
    result = _run(tmp_path)
    assert not result.ok
    failed = {check.name for check in result.checks if not check.ok}
    assert "varied steps: selection against the reference, bit for bit" in failed


@pytest.mark.slow
def test_the_demo_without_a_plant_is_green(tmp_path: Path) -> None:
    """The same run as the planted ones'."""
    result = _run(tmp_path)
    assert result.ok, [check for check in result.checks if not check.ok]


def test_a_result_without_checks_is_not_ok(tmp_path: Path) -> None:
    result = DemoResult(tmp_path / "t.jsonl")
    assert not result.ok
    result.check("one", True, "")
    assert result.ok
    result.check("two", False, "")
    assert not result.ok


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_demo_ends_its_service(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is in a session of its own, which the terminal's end does not reach."""
    ended = []

    def asked_to_end(*_: object) -> DemoResult:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        finally:
            ended.append(number)
        raise AssertionError("goes on")

    monkeypatch.setattr("dsa_indexer_cli.demo.run.run_demo", asked_to_end)
    done = CliRunner().invoke(app, ["demo", "--trace-file", str(tmp_path / "t.jsonl")])
    assert done.exit_code and ended == [number]
    assert not isinstance(done.exception, AssertionError)
