"""Lines of a trace file, written by hand: steps of which every time is known."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ipc_handoff.stages import (
    FINDING_EVENT,
    HOST_CLOCK_TICK,
    SERVICE_SPANS,
    STEP_SPAN,
    WORKER_SPANS,
)

BEGAN = 1_790_000_000_123_456_789
LAYERS = (0, 3, 7)
TICK = 32
WORKERS_CLOCK_ERROR = 900

SIDES = {span.name: "worker" for span in WORKER_SPANS}
SIDES |= {span.name: "service" for span in SERVICE_SPANS}
SIDES |= {STEP_SPAN: "worker", FINDING_EVENT: "service"}
# When the stages of a layer begin and end, in ticks since the layer began.
TIMES = {
    "dsa.stage": (0, 50),
    "dsa.gate": (10, 81),
    "dsa.logits": (81, 600),
    "dsa.topk": (600, 900),
    "dsa.answer": (900, 905),
    "dsa.handback": (931, 990),
    "dsa.attend": (1000, 1400),
}
LAYER = 1500


def span(
    name: str,
    begin: int,
    end: int,
    *,
    trace: str,
    attributes: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]] = (),
    error: str = "",
) -> str:
    """One line; times in ns since `BEGAN`."""
    side = SIDES[name]
    line = {
        "name": name,
        "context": {"trace_id": f"0x{trace}", "span_id": "0x01"},
        "parent_id": None if name == STEP_SPAN else "0x02",
        "start_time": _text(begin),
        "end_time": _text(end),
        "status": {"status_code": "ERROR", "description": error}
        if error
        else {"status_code": "OK"},
        "attributes": dict(attributes),
        "events": [{**event, "timestamp": _text(event["at"])} for event in events],
        "resource": {
            "attributes": {
                "service.name": f"dsa-indexer-{side}",
                "process.pid": {"worker": 11, "service": 22}[side],
                HOST_CLOCK_TICK: 4,
            }
        },
        "start_time_unix_nano": BEGAN + begin,
        "end_time_unix_nano": BEGAN + end,
    }
    return json.dumps(line)


def finding(stage: str, layer: int | None, at: int, **more: Any) -> dict[str, Any]:
    told = {FINDING_EVENT: "torn_input", "dsa.stage": stage, **more}
    if layer is not None:
        told["dsa.layer"] = layer
    return {"name": FINDING_EVENT, "at": at, "attributes": told}


def step_lines(
    step: int,
    *,
    begin: int = 0,
    slower: int = 0,
    trace: str = "",
    findings: Sequence[Mapping[str, Any]] = (),
    clock_error: int | None = 2100,
    incomplete: bool = False,
) -> list[str]:
    """A step of every stage; what it found is on the step's span.

    Args:
        begin: ns since `BEGAN`; slower: ns that the step takes longer at its end.
    """
    trace = trace or f"{step:032x}"
    known: dict[str, Any] = {"dsa.step": step, "dsa.epoch": 5, "dsa.rows": 8}
    lines = []
    for place, layer in enumerate(LAYERS):
        for name, (first, last) in TIMES.items():
            own = {**known, "dsa.layer": layer}
            if SIDES[name] == "service" and clock_error is not None:
                own["dsa.clock_error_ns"] = clock_error
            if SIDES[name] == "service" and incomplete:
                own["dsa.incomplete"] = True
            offset = begin + LAYER * TICK * place + 64
            lines.append(
                span(name, offset + first * TICK, offset + last * TICK, trace=trace, attributes=own)
            )
    events = list(findings)
    if clock_error is not None:
        told = {"dsa.clock_error_ns": WORKERS_CLOCK_ERROR}
        events.append({"name": "clock", "at": begin, "attributes": told})
    end = begin + LAYER * TICK * len(LAYERS) + 128 + slower
    lines.append(span(STEP_SPAN, begin, end, trace=trace, attributes=known, events=events))
    return lines


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _text(at: int) -> str:
    seconds, nanoseconds = divmod(BEGAN + at, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanoseconds // 1000)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
