"""A timeline as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsa_indexer_cli.trace.timeline import Mark, Process, Timeline

_US = 1000
"""Nanoseconds of the format's unit of time."""


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Two processes, a thread for each stage, findings and other events as instants.

    Raises:
        OSError: the file cannot be written.
    """
    document = {
        "traceEvents": list(_events(timeline)),
        "displayTimeUnit": "ns",
        "otherData": {
            "step": timeline.step,
            "epoch": timeline.epoch,
            "trace_id": timeline.trace,
            "clock": timeline.clock,
        },
    }
    path.write_text(json.dumps(document, default=str), encoding="utf-8")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    # Numbers of our own: in containers of their own both processes may have the same PID.
    tracks: dict[str, tuple[int, int]] = {}
    for number, process in enumerate(timeline.processes, 1):
        yield _name("process_name", number, 0, f"{process.side} {_pids(process)}".strip())
        yield _order("process_sort_index", number, 0, number)
        for place, lane in enumerate(process.lanes, 1):
            tracks[lane.stage] = (number, place)
            yield _name("thread_name", number, place, lane.stage)
            yield _order("thread_sort_index", number, place, place)
            for bar in lane.bars:
                yield {
                    "ph": "X",
                    "name": f"layer {bar.layer}",
                    "cat": f"{lane.stage},{bar.state.value}",
                    "pid": number,
                    "tid": place,
                    "ts": bar.begin / _US,
                    "dur": (bar.end - bar.begin) / _US,
                    "args": dict(bar.attributes),
                }
    for mark in timeline.marks:
        yield _instant(mark, tracks)


def _instant(mark: Mark, tracks: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    track = tracks.get(mark.stage)
    pid, tid = track or (1, 1)
    return {
        "ph": "i",
        "s": "g" if track is None else "t",
        "name": mark.name,
        "cat": "finding" if mark.is_finding else "event",
        "pid": pid,
        "tid": tid,
        "ts": mark.at / _US,
        "args": dict(mark.attributes),
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _order(kind: str, pid: int, tid: int, place: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"sort_index": place}}


def _pids(process: Process) -> str:
    return ", ".join(map(str, process.pids))
