"""The spans of a trace file: one JSON object a line, appended by both processes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ipc_handoff.stages import HOST_CLOCK_TICK


@dataclass(frozen=True)
class Event:
    """Attributes:
    at: wall time, ns.
    """

    name: str
    at: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """Attributes:
    trace: id of its trace, hexadecimal.
    parent: id of the span above it; empty if there is none.
    service: name of the process that exported it.
    begin, end: wall time, ns.
    error: why it did not end well; empty if it did.
    host_tick: of the monotonic clock in that process, ns; 0: not told.
    """

    name: str
    trace: str
    parent: str
    service: str
    pid: int
    begin: int
    end: int
    error: str
    host_tick: int
    attributes: Mapping[str, Any]
    events: tuple[Event, ...]


@dataclass
class TraceFile:
    """Attributes:
    unreadable: lines that are no span. A process that was killed may leave one.
    """

    spans: list[Span] = field(default_factory=list)
    unreadable: int = 0


def read_trace_file(path: Path) -> TraceFile:
    """
    Raises:
        OSError: the file cannot be read.
    """
    found = TraceFile()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                found.spans.append(_span(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                found.unreadable += 1
    return found


def _span(line: dict[str, Any]) -> Span:
    resource, status = line["resource"]["attributes"], line["status"]
    is_error = status["status_code"] == "ERROR"
    return Span(
        name=line["name"],
        trace=line["context"]["trace_id"].removeprefix("0x"),
        parent=(line["parent_id"] or "").removeprefix("0x"),
        service=resource["service.name"],
        pid=resource["process.pid"],
        begin=_at(line, "start_time"),
        end=_at(line, "end_time"),
        error=status.get("description") or "error" if is_error else "",
        host_tick=resource.get(HOST_CLOCK_TICK, 0),
        attributes=line["attributes"],
        events=tuple(
            Event(event["name"], _wall_time(event["timestamp"]), event["attributes"])
            for event in line["events"]
        ),
    )


def _at(line: dict[str, Any], name: str) -> int:
    # Only files of this project have the exact one.
    exact = line.get(f"{name}_unix_nano")
    return _wall_time(line[name]) if exact is None else int(exact)


def _wall_time(text: str) -> int:
    # In whole microseconds: a float of seconds has not enough digits.
    moment = datetime.fromisoformat(text)
    return int(moment.replace(microsecond=0).timestamp()) * 10**9 + moment.microsecond * 1000
