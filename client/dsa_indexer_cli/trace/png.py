"""A timeline as a picture. Needs matplotlib."""

from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

from dsa_indexer_cli.trace.colours import ERROR, EVENT, FINDING, INCOMPLETE, STAGE_COLOURS
from dsa_indexer_cli.trace.timeline import Bar, State, Timeline

matplotlib.use("Agg")

_US = 1000
_HEIGHT = 0.7


def write_png(timeline: Timeline, path: Path) -> None:
    """
    Raises:
        OSError: the file cannot be written.
    """
    lanes = [(process, lane) for process in timeline.processes for lane in process.lanes]
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.4 * len(lanes)), layout="constrained")
    for place, (_, lane) in enumerate(lanes):
        for bar in lane.bars:
            _draw(axes, bar, place)
    rows = {lane.stage: place for place, (_, lane) in enumerate(lanes)}
    for mark in timeline.marks:
        colour = FINDING if mark.is_finding else EVENT
        axes.axvline(mark.at / _US, color=colour, linewidth=0.6, alpha=0.6, zorder=1)
        if mark.is_finding:
            place = rows.get(mark.stage, 0)
            axes.plot(mark.at / _US, place - 0.5, marker="v", color=colour, clip_on=False)
            axes.annotate(
                mark.name, (mark.at / _US, place - 0.5), (4, 2), textcoords="offset points",
                color=colour, fontsize=7,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [f"{process.side}  {lane.stage}" for process, lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.9)
    axes.set_xlim(0, max(timeline.duration, 1) / _US)
    axes.set_xlabel("µs since the step began")
    axes.set_title(
        f"step {timeline.step}, {timeline.rows} rows, epoch {timeline.epoch}, "
        f"trace {timeline.trace}", fontsize=9, loc="left",
    )  # fmt: skip
    figure.supxlabel(timeline.clock, fontsize=7, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=150, format="png")
    finally:
        pyplot.close(figure)


def _draw(axes: Axes, bar: Bar, place: int) -> None:
    colour = INCOMPLETE if bar.state is State.INCOMPLETE else STAGE_COLOURS[bar.stage]
    axes.broken_barh(
        [(bar.begin / _US, (bar.end - bar.begin) / _US)],
        (place - _HEIGHT / 2, _HEIGHT),
        facecolors=colour,
        edgecolors=ERROR if bar.state is State.ERROR else "white",
        linewidth=1.2 if bar.state is State.ERROR else 0.3,
        hatch="//" if bar.state is State.INCOMPLETE else None,
        zorder=2,
    )
