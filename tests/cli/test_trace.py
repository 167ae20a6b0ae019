"""`dsa-indexer trace`: which step it takes, what it draws of it, and what it says instead."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from dsa_indexer_cli.main import app
from dsa_indexer_cli.trace.spans import read_trace_file
from dsa_indexer_cli.trace.timeline import State, timelines
from indexer_service.telemetry import StepTelemetry
from ipc_handoff.stages import FINDING_EVENT, SERVICE_SPANS, WORKER_SPANS
from ipc_handoff.telemetry.tracing import TraceSettings, start
from tests.cli.lines import one_line
from tests.support.plants import pair
from tests.support.trace_lines import BEGAN, LAYERS, TICK, TIMES, finding, span, step_lines, write
from tests.support.traces import attended_step

STAGES = [span.name for span in (*WORKER_SPANS, *SERVICE_SPANS)]
FINDING = finding(
    "dsa.gate", 3, 150_000, **{"dsa.expected": "<4096>", "dsa.seen": "4097 & more", "dsa.row": 2}
)


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Steps 1, 2 (the slowest) and 3, which has a finding."""
    return write(
        tmp_path / "t.jsonl",
        *step_lines(1),
        *step_lines(2, begin=1_000_000, slower=500_000),
        *step_lines(3, begin=2_000_000, findings=[FINDING]),
    )


def test_a_file_of_two_processes_is_read_back(tmp_path: Path) -> None:
    """Stages of both sides in order, every time to the nanosecond."""
    path = tmp_path / "t.jsonl"
    worker, service = (
        start(TraceSettings(f"dsa-indexer-{s}", path)) for s in ("worker", "service")
    )
    assert worker is not None and service is not None
    with pair(tmp_path, tracing=worker, observer=StepTelemetry(service)) as running:
        ids = [attended_step(running) for _ in range(3)]
    service.close()
    read = read_trace_file(path)
    found = timelines(read.spans)
    assert not read.unreadable
    assert [timeline.trace for timeline in found] == ids
    assert [timeline.step for timeline in found] == [1, 2, 3]
    for timeline in found:
        assert not timeline.error
        assert [process.clock_error for process in timeline.processes] == [None, None]
        assert [lane.stage for p in timeline.processes for lane in p.lanes] == STAGES
        for process in timeline.processes:
            assert process.tick == 1
            for lane in process.lanes:
                assert [bar.layer for bar in lane.bars] == [2, 5, 9]
                assert all(0 <= bar.begin <= bar.end <= timeline.duration for bar in lane.bars)
                assert all(one.end <= next.begin for one, next in pairwise(lane.bars))
    assert "host's monotonic clock" in found[0].clock


def test_times_of_a_file_of_others_are_whole_microseconds(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        del line["start_time_unix_nano"], line["end_time_unix_nano"]
    write(file, *map(json.dumps, lines))
    spans = read_trace_file(file).spans
    assert spans[0].begin == (BEGAN + 64) // 1000 * 1000


def test_the_tick_and_the_error_of_the_clock_are_stated(file: Path) -> None:
    clock = timelines(read_trace_file(file).spans)[0].clock
    assert "worker within ± 900 ns, service within ± 2,100 ns" in clock
    assert "worker 32 ns, service 32 ns" in clock


def test_a_stage_that_never_ended_does_not_count_for_the_tick(tmp_path: Path) -> None:
    known = {"dsa.step": 1, "dsa.layer": 9}
    odd = span("dsa.topk", 64, 6413, trace=f"{1:032x}", attributes=known, error="never ended")
    path = write(tmp_path / "t", *step_lines(1), odd)
    (timeline,) = timelines(read_trace_file(path).spans)
    assert timeline.processes[1].tick == TICK
    (bar,) = [bar for lane in timeline.processes[1].lanes for bar in lane.bars if bar.layer == 9]
    assert bar.state is State.ERROR
    assert bar.attributes["status"] == "never ended"


def test_stages_that_the_worker_told_for_a_dead_service_are_the_services(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *step_lines(1, incomplete=True))
    worker, service = timelines(read_trace_file(path).spans)[0].processes
    assert {bar.state for lane in service.lanes for bar in lane.bars} == {State.INCOMPLETE}
    assert {bar.state for lane in worker.lanes for bar in lane.bars} == {State.WELL}
    assert worker.pids and not service.pids


def test_a_worker_that_was_killed_leaves_a_step_without_its_span(tmp_path: Path) -> None:
    lines = [line for line in step_lines(4) if '"dsa.handback"' not in line][:-1]
    (timeline,) = timelines(read_trace_file(write(tmp_path / "t", *lines)).spans)
    assert timeline.step == 4
    assert timeline.error == "the worker never ended it"


def test_a_finding_stands_where_it_happened_and_not_where_it_was_told(file: Path) -> None:
    (mark,) = timelines(read_trace_file(file).spans)[-1].findings
    gates = timelines(read_trace_file(file).spans)[-1].processes[1].lanes[0]
    assert (mark.name, mark.stage) == ("torn_input", "dsa.gate")
    assert mark.at == gates.bars[1].end


def test_a_finding_of_all_layers_stands_at_the_first_and_of_a_wait_at_its_end(
    tmp_path: Path,
) -> None:
    told = [finding("dsa.gate", None, 900_000), finding("dsa.wait", 3, 900_000)]
    path = write(tmp_path / "t", *step_lines(1, findings=told))
    (timeline,) = timelines(read_trace_file(path).spans)
    at = {mark.stage: mark.at for mark in timeline.findings}
    worker, service = timeline.processes
    assert at == {
        "dsa.gate": service.lanes[0].bars[0].end,
        "dsa.handback": worker.lanes[1].bars[1].begin,
    }


def test_too_few_times_tell_no_tick(tmp_path: Path) -> None:
    *stages, whole = step_lines(1)
    few = [*(line for line in stages if '"dsa.layer": 0' in line), whole]
    (timeline,) = timelines(read_trace_file(write(tmp_path / "t", *few)).spans)
    assert [process.tick for process in timeline.processes] == [0, 0]
    assert "not seen" in timeline.clock


def test_without_a_gpu_the_hosts_clock_has_told_its_tick(tmp_path: Path) -> None:
    lines = step_lines(1, clock_error=None)[:7]
    (timeline,) = timelines(read_trace_file(write(tmp_path / "t", *lines)).spans)
    assert [process.tick for process in timeline.processes] == [4, 4]


def test_what_was_found_late_makes_the_step_no_longer(tmp_path: Path) -> None:
    told = finding("dsa.gate", 3, 5_000_000)
    late = span(
        FINDING_EVENT,
        5_000_000,
        5_000_000,
        trace=f"{1:032x}",
        attributes={"dsa.step": 1},
        events=[told],
    )
    path = write(tmp_path / "t", *step_lines(1), late)
    (timeline,) = timelines(read_trace_file(path).spans)
    (mark,) = timeline.findings
    assert mark.at < timeline.duration < 1_000_000
    (alone,) = timelines(read_trace_file(write(tmp_path / "u", late)).spans)
    assert len(alone.findings) == 1


def test_without_an_output_the_steps_are_listed(file: Path) -> None:
    result = trace(file)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "0000000" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["1", "2", "3"]
    assert "torn_input" in rows[2]
    assert "torn_input" not in rows[0] + rows[1]


def test_machines_get_the_steps_and_their_findings(file: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(file), "--json"])
    steps = json.loads(result.stdout)["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [len(step["findings"]) for step in steps] == [0, 0, 1]
    assert steps[2]["findings"][0]["kind"] == "torn_input"
    assert steps[2]["findings"][0]["dsa.seen"] == "4097 & more"
    assert steps[0]["duration_ns"] + 500_000 == steps[1]["duration_ns"]


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ((), 3),
        (("--slowest",), 2),
        (("--step", 1), 1),
        (("--trace-id", f"{2:032x}"), 2),
        (("--finding", "torn_input"), 3),
        (("--finding", "torn_input", "--slowest"), 3),
    ],
    ids=str,
)
def test_which_step_is_taken(options: tuple[object, ...], step: int, file: Path) -> None:
    out = file.with_suffix(".json")
    result = trace(file, "--perfetto", out, *options)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["otherData"]["step"] == step


def test_of_two_workers_with_the_same_step_the_newest_counts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        *step_lines(1, begin=9_000_000, trace="b" * 32),
        *step_lines(1, trace="a" * 32),
    )
    result = trace(path, "--perfetto", tmp_path / "o", "--step", 1)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "o").read_text())["otherData"]["trace_id"] == "b" * 32


def test_perfetto_gets_two_processes_with_a_thread_a_stage(file: Path) -> None:
    out = file.with_suffix(".json")
    assert trace(file, "--perfetto", out).exit_code == 0
    document = json.loads(out.read_text())
    events = document["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "worker 11", 2: "service 22"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert list(threads.values()) == STAGES
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(LAYERS) * len(STAGES)
    for bar in bars:
        first, last = TIMES[threads[bar["pid"], bar["tid"]]]
        assert bar["dur"] == pytest.approx((last - first) * TICK / 1000)
        assert bar["name"] == f"layer {bar['args']['dsa.layer']}"
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert mark["cat"] == "finding"
    assert threads[mark["pid"], mark["tid"]] == "dsa.gate"
    assert mark["args"]["dsa.seen"] == "4097 & more"
    assert document["otherData"]["clock"].startswith("Stages by the GPU's clock")


def test_the_picture_shows_every_stage_and_marks_findings(file: Path) -> None:
    """Each in its colour."""
    pictures = []
    for step in (1, 3):
        out = file.with_suffix(f".{step}.png")
        result = trace(file, "--png", out, "--step", step)
        assert result.exit_code == 0, result.output
        image = Image.open(out).convert("RGB")
        pictures.append({colour for _, colour in image.getcolors(2**24) or ()})
    bars = {(0x3B, 0x6F, 0xB6), (0x8F, 0x9F, 0xD6), (0xD9, 0x8A, 0x3D), (0xC2, 0x60, 0x3A)}
    finding = (0xC0, 0x1C, 0x28)
    assert bars <= pictures[0] & pictures[1]
    assert finding not in pictures[0]
    assert finding in pictures[1]


@pytest.mark.parametrize(("option", "module"), [("--html", "jinja2"), ("--png", "matplotlib")])
def test_a_missing_extra_is_named(
    option: str, module: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == module or name.startswith("dsa_indexer_cli.trace."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    result = trace(file, option, file.with_suffix(".out"))
    assert result.exit_code == 2
    said = one_line(result.output)
    assert module in said
    assert "pip install 'dsa-indexer[plots]'" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--step", 9), "fit none of the 3 steps"),
        (("--finding", "bad_page"), "fit none of the 3 steps"),
        (("--perfetto", "/nowhere/x"), "No such file"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(
    options: tuple[object, ...], says: str, file: Path
) -> None:
    outputs = () if "--perfetto" in options else ("--perfetto", file.with_suffix(".json"))
    result = trace(file, *outputs, *options)
    assert result.exit_code == 2
    assert says in one_line(result.output)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = trace(tmp_path / "none")
    assert result.exit_code == 2
    assert "DSA_INDEXER_TRACE_FILE" in one_line(result.output)


def test_a_file_without_a_step_is_one_line(tmp_path: Path) -> None:
    result = trace(write(tmp_path / "t"))
    assert result.exit_code == 2
    assert "holds no step" in one_line(result.output)


def test_a_line_that_was_cut_off_is_left_out_and_told(file: Path) -> None:
    with file.open("a") as lines:
        lines.write(step_lines(4)[-1][:70])
    result = trace(file)
    assert result.exit_code == 0
    assert "1 lines are no spans" in result.output
    assert "torn_input" in result.output
