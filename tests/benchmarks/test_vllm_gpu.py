"""What the comparison of vLLM's backends complains about; it runs on a GPU elsewhere."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from tests.benchmarks.conftest import Program

MODULES = ("model", "cases", "compare", "aims", "tables", "processes", "bench", "phases")
"""Each behind those that it imports."""


@pytest.fixture
def load(program: Program) -> Callable[[str], ModuleType]:
    """A module of the comparison, by the end of its name."""
    loaded = {name: program(f"vllm_gpu_{name}") for name in MODULES}
    return loaded.__getitem__


COUNTS = {"placement": "mps", "detachments": 0, "inline_layers": 0, "answered_layers": 9}


def case(**changed: Any) -> dict[str, Any]:
    tokens = {"1 x 4096": [[[1, 2], [-0.1, -0.2]]]}
    found = {"prefill": [[-1.0, -2.0]], "decode": tokens, "again": tokens}
    return {"start_seconds": 1.0, "blocks": 7, **found, "statistics": [[dict(COUNTS)]], **changed}


@pytest.mark.parametrize("cases", ["ONE_GPU", "TWO_GPUS"])
def test_equal_cases_are_not_complained_about(
    load: Callable[[str], ModuleType], cases: str
) -> None:
    known = getattr(load("cases"), cases)
    found = {name: case() for name in known}
    assert load("compare").complaints(found, known) == []


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("inline", {"again": {}}, "does not repeat"),
        ("remote", {"decode": {}, "again": {}}, "decode differs in bits from inline"),
        ("remote, SM80", {"prefill": [[-1.0, -2.0001]]}, "prefill differs in bits"),
        ("inline, SM80", {"prefill": [[-1.5, -2.5]], "decode": {}, "again": {}}, "0.5 off"),
        ("remote", {"statistics": [[{**COUNTS, "inline_layers": 1}]]}, "inline_layers"),
        ("remote", {"statistics": [[{**COUNTS, "answered_layers": 0}]]}, "answered"),
        ("remote", {"statistics": [[]]}, "sessions"),
        ("FLASHMLA_SPARSE", {"failed": "no such device"}, "no such device"),
    ],
)
def test_what_differs_is_named(
    load: Callable[[str], ModuleType], name: str, changed: dict[str, Any], says: str
) -> None:
    known = load("cases").ONE_GPU
    found = {each: case() for each in known}
    found[name] = case(**changed)
    said = load("compare").complaints(found, known)
    assert any(each.startswith(f"{name}: ") and says in each for each in said), said


def test_vllm_need_not_repeat_itself(load: Callable[[str], ModuleType]) -> None:
    known = load("cases").ONE_GPU
    found = {name: case() for name in known}
    found["FLASHMLA_SPARSE"] = case(again={})
    assert load("compare").complaints(found, known) == []


def samples(path: Path, selections: torch.Tensor, attention: torch.Tensor) -> str:
    torch.save({"selections": selections, "attention": attention}, path)
    return str(path)


def test_selections_are_compared_as_sets_and_attention_within_a_tolerance(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    known = {name: load("cases").ONE_GPU[name] for name in ("FLASHMLA_SPARSE", "inline")}
    chosen = torch.stack([torch.randperm(4000)[:2048] for _ in range(3)]).int()[None]
    attended = torch.randn(1, 3, 64)
    ordered = chosen.sort().values
    wrong = torch.where(ordered > 0, ordered - 1, ordered)  # shifted by one
    found = {
        "FLASHMLA_SPARSE": case(samples=samples(tmp_path / "a", chosen, attended)),
        "inline": case(samples=samples(tmp_path / "b", ordered, attended * 1.001)),
    }
    assert load("compare").complaints(found, known) == []
    assert found["inline"]["overlap"] == [1.0]
    found["inline"] = case(samples=samples(tmp_path / "c", wrong, attended * 1.1))
    first, second = load("compare").complaints(found, known)
    assert "selections share" in first
    assert "attention is 0.1 off" in second


def test_a_selection_of_another_order_is_another_answer_of_ours(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    known = {name: load("cases").ONE_GPU[name] for name in ("inline", "remote")}
    chosen, attended = torch.arange(6).view(1, 2, 3), torch.randn(1, 2, 8)
    found = {
        "inline": case(samples=samples(tmp_path / "a", chosen, attended)),
        "remote": case(samples=samples(tmp_path / "b", chosen, attended)),
    }
    assert load("compare").complaints(found, known) == []
    found["remote"] = case(samples=samples(tmp_path / "c", chosen.flip(2), attended))
    (said,) = load("compare").complaints(found, known)
    assert said == "remote: selections differ in bits from inline"


def killed(**changed: Any) -> dict[str, dict[str, Any]]:
    after = {**COUNTS, "detachments": 1, "inline_layers": 5}
    remote = {
        "load": [1],
        "load, again": [1],
        "attached again": True,
        "after the kill": [[after]],
        "statistics": [[{**after, "answered_layers": 20}]],
    }
    return {"inline": {"load": [1]}, "remote": {**remote, **changed}}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"load": [2]}, "load differs in bits"),
        ({"load, again": [2]}, "load, again differs in bits"),
        ({"after the kill": [[COUNTS]]}, "not killed among steps"),
        ({"attached again": False}, "taken again"),
        ({"failed": "hangs"}, "remote: hangs"),
    ],
)
def test_a_kill_must_leave_no_trace_in_the_answers(
    load: Callable[[str], ModuleType], changed: dict[str, Any], says: str | None
) -> None:
    said = load("compare").after_kills(killed(**changed), {})
    assert [says in each for each in said] == [True] if says else said == []


def test_the_table_has_a_line_for_each_case(load: Callable[[str], ModuleType]) -> None:
    found = {
        "remote": case(milliseconds={"1 x 4096": {"gpu": 1.5, "wall": 2.0}}, overlap=[0.999]),
        "broken": {"failed": "Traceback\nno such device\n"},
    }
    title, remote, broken = load("tables").table("times", found).splitlines()
    assert "times" in title
    assert "[1 x 4096] gpu 1.5 wall 2.0" in remote
    assert "answered 9" in remote
    assert "failed: no such device" in broken


def test_aims_are_ratios_of_gpu_times(load: Callable[[str], ModuleType]) -> None:
    def timed(short: float, long: float) -> dict[str, Any]:
        return {"milliseconds": {"1 x 4096": {"gpu": short}, "1 x 65536": {"gpu": long}}}

    times = {
        "FLASHMLA_SPARSE": timed(2.0, 2.0),
        "FLASH_ATTN_MLA_SPARSE": timed(1.0, 4.0),
        "inline": timed(1.1, 2.0),
        "remote": timed(1.155, 2.1),
        "inline, no MPS": {"failed": "no time was left"},
    }
    seconds = {"without the plugin": 30.0, "inline, first": 60.0, "inline, again": 36.0}
    starts = {name: {"start_seconds": each} for name, each in seconds.items()}
    found = load("aims").aims({"times": times, "start": starts})
    assert [str(each) for each in found] == [
        "[1 x 4096] inline / the better native: 1.1 (at most 1.0: MISSED)",
        "[1 x 4096] remote / inline: 1.05 (at most 1.06: reached)",
        "[1 x 65536] inline / the better native: 1.0 (at most 1.0: reached)",
        "[1 x 65536] remote / inline: 1.05 (at most 1.03: MISSED)",
        "start, inline, first: seconds more: 30.0",
        "start, inline, again: seconds more: 6.0 (at most 5.0: MISSED)",
    ]


ENGINES = {
    "works": """
import json, os, sys
out = os.fdopen(int(sys.argv[2]), "w", buffering=1)
print(json.dumps({"start_seconds": 0.1, "blocks": 3}), file=out)
for line in sys.stdin:
    print(json.dumps([[-1.0]] if "prefill" in line else [[]]), file=out)
""",
    "ends": "import sys; sys.exit('no such device')",
    "hangs": "import time; time.sleep(600)",
}


@pytest.fixture
def bench(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """On a CPU; a case is an engine of `ENGINES`, by its backend."""
    for name, program in ENGINES.items():
        (tmp_path / f"{name}.py").write_text(program)
    processes = load("processes")
    popen = processes.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        wanted = tmp_path / f"{options['env']['BACKEND']}.py"
        return popen([command[0], str(wanted), *command[2:]], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    (tmp_path / "run").mkdir()
    module = load("bench")
    with module.Bench("rehearsal", "cpu", tmp_path / "run", 30) as made:
        yield made


def test_an_engine_that_fails_does_not_lose_the_others(
    load: Callable[[str], ModuleType], bench: Any
) -> None:
    kind = load("cases").Case
    cases = {name: kind("CUSTOM", {"BACKEND": name}) for name in ("ends", "works")}
    found: dict[str, Any] = {}
    load("phases").answers(bench, cases, found)
    assert "no such device" in found["ends"]["failed"]
    assert found["works"]["prefill"] == [[-1.0]]
    assert found["works"]["blocks"] == 3


def test_an_engine_that_says_nothing_is_not_waited_for(
    load: Callable[[str], ModuleType], bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("bench"), "START_SECONDS", 0.2)
    found: dict[str, Any] = {}
    with bench.engines({"a": load("cases").Case("CUSTOM", {"BACKEND": "hangs"})}, found) as engines:
        assert engines == {}
    assert "said nothing" in found["a"]["failed"]


def test_when_the_time_is_over_what_is_there_is_kept(
    load: Callable[[str], ModuleType], bench: Any
) -> None:
    found: dict[str, Any] = {}
    cases = {"a": load("cases").Case("CUSTOM", {"BACKEND": "works"})}
    with bench.engines(cases, found) as engines:
        bench.give(0)
        with load("bench").noted(found, "a"):
            bench.ask(engines["a"], "decode")
    assert found["a"] == {"start_seconds": 0.1, "blocks": 3, "failed": "no time was left"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"phase": ["answer"]}, r"phase: answer \(fix: one of answers; "),
        ({"case": ["remot"]}, r"case: remot \(fix: one of inline; remote\)"),
    ],
)
def test_what_is_not_known_is_not_left_out_in_silence(
    program: Program, given: dict[str, list[str]], said: str
) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        program("vllm_gpu").main(**given, rehearse=True)


def test_each_phase_has_its_own_minutes(
    program: Program, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = program("vllm_gpu")
    deadlines: list[float] = []

    def run(bench: Any, wanted: object, found: object) -> None:
        deadlines.append(bench._deadline)

    cases = {"inline": load("cases").Case(None)}
    phases = dict.fromkeys(("first", "second"), (run, lambda *_: [], cases))
    monkeypatch.setattr(comparison, "PHASES_ON_A_CPU", phases)
    with pytest.raises(SystemExit) as ended:
        comparison.main(rehearse=True, minutes=8.0)
    assert not ended.value.code
    first, second = deadlines
    assert first < second


def test_a_kill_needs_both_engines(load: Callable[[str], ModuleType], bench: Any) -> None:
    cases = {"remote": load("cases").REHEARSED["remote"]}
    with pytest.raises(ValueError, match=r"case: remote alone \(fix: "):
        load("phases").kills(bench, cases, {})


def test_a_run_that_begins_no_phase_leaves_the_days_file_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = program("vllm_gpu")
    written: list[object] = []

    def no_daemon(*_: object) -> None:
        raise RuntimeError("mps: no daemon could be started")

    monkeypatch.setattr(comparison, "Bench", no_daemon)
    monkeypatch.setattr(comparison, "_write", lambda *told: written.append(told))
    with pytest.raises(RuntimeError, match="no daemon"):
        comparison.main()
    assert not written
