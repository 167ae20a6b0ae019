"""A timeline as one HTML file that needs nothing else. Needs jinja2."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dsa_indexer_cli.trace.colours import STAGE_COLOURS
from dsa_indexer_cli.trace.timeline import Bar, Lane, Mark, Timeline

_LABELS = 136
_WIDTH = 1064
_LANE = 26
_BAR = 18
_HEADER = 24
_TICKS = 8


def write_html(timeline: Timeline, path: Path) -> None:
    """
    Raises:
        OSError: the file cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("dsa_indexer_cli.trace"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("timeline.html")
    path.write_text(template.render(_page(timeline)), encoding="utf-8")


@dataclass(frozen=True)
class _Rectangle:
    """A bar where the file is opened; the page's script moves it."""

    x: float
    y: float
    width: float
    bar: Bar
    about: str


@dataclass(frozen=True)
class _Line:
    """A labelled line of the drawing: a process (no stage), or one of its stages."""

    y: float
    label: str
    stage: str
    rectangles: tuple[_Rectangle, ...]


@dataclass(frozen=True)
class _Sign:
    """A mark where the file is opened."""

    x: float
    y: float
    mark: Mark
    about: str


def _page(timeline: Timeline) -> dict[str, Any]:
    drawing = _Drawing(timeline)
    return {
        "timeline": timeline,
        "colours": STAGE_COLOURS,
        "lines": drawing.lines,
        "signs": drawing.signs(),
        "left": _LABELS,
        "width": _WIDTH,
        "height": drawing.height,
        "bar": _BAR,
        "ticks": _TICKS,
        "stages": [_stage(p.side, lane) for p in timeline.processes for lane in p.lanes],
    }


class _Drawing:
    """Where everything is when the file is opened: the whole step."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._scale = _WIDTH / max(timeline.duration, 1)
        self.lines: list[_Line] = []
        self._places: dict[str, float] = {}
        y = float(_HEADER)
        for process in timeline.processes:
            pids = ", ".join(map(str, process.pids))
            self.lines.append(_Line(y, f"{process.side} {pids and f'(pid {pids})'}", "", ()))
            y += _LANE
            for lane in process.lanes:
                bars = tuple(self._rectangle(bar, y) for bar in lane.bars)
                self.lines.append(_Line(y, lane.stage, lane.stage, bars))
                self._places[lane.stage] = y
                y += _LANE
        self.height = y + 8

    def signs(self) -> list[_Sign]:
        top = _HEADER - 6
        return [
            _Sign(
                self._x(mark.at), self._places.get(mark.stage, top), mark,
                _about(mark.name, mark.attributes, mark.at),
            )
            for mark in self._timeline.marks
        ]  # fmt: skip

    def _x(self, at: int) -> float:
        return round(at * self._scale, 2)

    def _rectangle(self, bar: Bar, y: float) -> _Rectangle:
        took = _microseconds(bar.end - bar.begin)
        title = f"{bar.stage}, layer {bar.layer}: {took}, {bar.state.value}"
        about = _about(title, bar.attributes, bar.begin)
        return _Rectangle(
            self._x(bar.begin),
            y,
            round(max((bar.end - bar.begin) * self._scale, 0.6), 2),
            bar,
            about,
        )


def _about(title: str, attributes: Mapping[str, Any], at: int) -> str:
    lines = [title, f"at {_microseconds(at)}"]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in attributes.items())])


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1000:,.3f} µs"


def _stage(side: str, lane: Lane) -> dict[str, str]:
    times = [bar.end - bar.begin for bar in lane.bars]
    return {
        "stage": lane.stage,
        "process": side,
        "layers": str(len(times)),
        "median": _microseconds(int(median(times))) if times else "",
        "longest": _microseconds(max(times)) if times else "",
        "sum": _microseconds(sum(times)) if times else "",
    }
